"""Checkpoints: written in one layout, read in any; refused whole, or loaded whole."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from world import World

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine.checkpoint import Checkpointer, CheckpointFailed
from copus_lightning.engine.checkpoint_format import Manifest, newest
from copus_lightning.engine.engine import Engine

from . import tiny
from .tiny import TIED, UNTIED, Tiny

DP4, DP2TP2, TP2PP2, PP4 = Layout(data=4), Layout(2, 2, 1), Layout(1, 2, 2), Layout(pipeline=4)


@contextmanager
def running(layout: Layout, *args: Any, **kwargs: Any) -> Iterator[tuple[Engine, Checkpointer]]:
    """An engine with its checkpointer."""
    with tiny.running(layout, *args, **kwargs) as engine:
        checkpointer = Checkpointer(engine)
        try:
            yield engine, checkpointer
        finally:
            checkpointer.close()


def batches(start: int, stop: int) -> list[tiny.Batch]:
    return [tiny.make_batch("counting", seed) for seed in range(start, stop)]


def diverge(engine: Engine) -> None:
    """Makes weights and moments other than any checkpoint's."""
    tiny.train(engine, batches(100, 101))


# -- round trips -------------------------------------------------------------------------------------------


def saved_and_loaded(
    path: str, kind: str, model: Tiny, dtype: torch.dtype, zero_stage: int, targets: list[tuple[Layout, int]]
) -> list[tuple[list[str], float]]:
    """For each target: what is not bit-identical after loading, and how far two further losses are off."""
    with running(DP2TP2, model, kind, 2, dtype=dtype, zero_stage=zero_stage) as (engine, checkpointer):
        tiny.train(engine, batches(0, 2))
        checkpointer.save(path, {"answer": 42})
        before = tiny.state(engine)
        losses = tiny.train(engine, batches(2, 4))
    found = []
    for layout, target_stage in targets:
        micro = 8 // layout.data if layout.pipeline == 1 else 2
        with running(layout, model, kind, micro, dtype=dtype, zero_stage=target_stage) as (
            engine,
            checkpointer,
        ):
            diverge(engine)
            assert checkpointer.load(path) == {"answer": 42}
            different = tiny.differences(before, tiny.state(engine))
            further = tiny.train(engine, batches(2, 4))
            found.append((different, max(abs(a - b) for a, b in zip(losses, further, strict=True))))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("kind", "model", "dtype", "zero_stage", "targets"),
    [
        ("adamw", TIED, torch.float32, 1, [(PP4, 1), (DP4, 0), (TP2PP2, 1)]),
        ("sgd", UNTIED, torch.float32, 0, [(TP2PP2, 0), (DP4, 1)]),
        ("lion", UNTIED, torch.bfloat16, 1, [(PP4, 0)]),
    ],
    ids=["adamw", "sgd", "lion"],
)
def test_what_one_layout_wrote_any_layout_reads(
    world: World,
    tmp_path: Path,
    kind: str,
    model: Tiny,
    dtype: torch.dtype,
    zero_stage: int,
    targets: list[tuple[Layout, int]],
) -> None:
    path = tmp_path / "checkpoint"
    found = world.run(saved_and_loaded, str(path), kind, model, dtype, zero_stage, targets, timeout=240)
    for different, distance in found[0]:
        assert not different
        assert distance < (1e-6 if dtype == torch.float32 else 1e-2)

    # Any DCP tool reads it as whole tensors, under the model's own names.
    manifest = Manifest.read(path)
    weights = {name: torch.full(shape, torch.nan) for name, shape in manifest.tensors.items()}
    dcp.load(weights, checkpoint_id=path, no_dist=True)
    assert weights.keys() == dict(model.build().named_parameters()).keys()
    assert all(bool(value.isfinite().all()) for value in weights.values())


def leg(
    source: str | None, target: str, layout: Layout, start: int, stop: int
) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor], list[float]]:
    """Loads, draws random numbers, trains, saves: state on arrival, losses, state at the end, and the draws."""
    with running(layout, TIED, micro_batch_size=4 // layout.data) as (engine, checkpointer):
        if source is not None:
            diverge(engine)
            checkpointer.load(source)
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        arrival = tiny.state(engine)
        losses = tiny.train(engine, batches(start, stop))
        checkpointer.save(target)
        draws += [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return arrival, losses, tiny.state(engine), draws


def test_a_run_goes_on_with_fewer_and_with_more_ranks(world: World, tmp_path: Path) -> None:
    legs = [DP2TP2, Layout(tensor=2), Layout(), PP4]
    paths = [str(tmp_path / str(index)) for index in range(len(legs))]
    losses: list[float] = []
    before: dict[str, torch.Tensor] = {}
    draws: list[list[float]] = []
    for index, layout in enumerate(legs):
        source = paths[index - 1] if index else None
        args = (source, paths[index], layout, 2 * index, 2 * index + 2)
        by_rank = world.run(leg, *args, ranks=layout.world_size)
        arrival, new_losses, end, _ = by_rank[0]
        if source is not None:
            assert not tiny.differences(before, arrival), f"{layout} begins where {legs[index - 1]} ended"
        for rank, (_, _, _, drawn) in enumerate(by_rank[: len(draws)]):
            assert drawn[:3] == draws[rank][3:], f"rank {rank} goes on with its random numbers"
        streams = {tuple(drawn[:3]) for _, _, _, drawn in by_rank}
        assert len(streams) == len(by_rank) or source is None, "no two ranks draw the same"
        draws = [drawn for _, _, _, drawn in by_rank]
        losses += new_losses
        before = end
    alone = tiny.train_alone("adamw", batches(0, 8), None, TIED)
    assert losses == pytest.approx(alone, rel=1e-5)


def beginnings(directory: str) -> dict[str, Any]:
    """Checkpoints without moments, and of the weights alone."""
    first, weights = f"{directory}/first", f"{directory}/weights"
    found: dict[str, Any] = {}
    with running(DP4, zero_stage=1) as (engine, checkpointer):
        checkpointer.save(first)
        fresh = tiny.state(engine)
        tiny.train(engine, batches(0, 2))
        checkpointer.save(weights, optimizer=False)
        trained = tiny.state(engine)
        checkpointer.load(first)
        found["first"] = tiny.differences(fresh, tiny.state(engine))
        engine.switch(Configuration(PP4, 8, 2))
        tiny.train(engine, batches(0, 2))
        again = tiny.state(engine)
        found["training again"] = max((again[k] - trained[k]).abs().max().item() for k in trained)

        diverge(engine)
        moments = {k: v for k, v in tiny.state(engine).items() if not k.startswith("master")}
        checkpointer.load(weights, optimizer=False)
        masters = {k: v for k, v in trained.items() if k.startswith("master")}
        found["weights"] = tiny.differences({**moments, **masters}, tiny.state(engine))
        try:
            checkpointer.load(weights)
        except ValueError as error:
            found["weights alone"] = str(error)
        engine.step(tiny.share(engine, batches(0, 1)[0]))
        try:
            checkpointer.save(first)
        except RuntimeError as error:
            found["in a step"] = str(error)
        engine.discard()
    return found


def test_a_checkpoint_of_the_first_weights_and_one_of_weights_alone(world: World, tmp_path: Path) -> None:
    found = world.run(beginnings, str(tmp_path))[0]
    assert not found["first"]
    assert found["training again"] < 1e-5
    assert not found["weights"], "the moments stay"
    assert "holds weights alone: load the model without the optimizer" in found["weights alone"]
    assert "between the model's call and optimizer.step()" in found["in a step"]


# -- what is refused ---------------------------------------------------------------------------------------


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / files.MANIFEST
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def add_key(folder: Path) -> None:
    """A tensor more in DCP's metadata, with a manifest that agrees about the file."""
    path = folder / files.METADATA
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["intruder"] = metadata.state_dict_metadata["lm_head.weight"]
    path.write_bytes(pickle.dumps(metadata))
    edit_manifest(folder, lambda m: m["files"].update({files.METADATA: files.describe_file(path)}))


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: (f / "__2_0.distcp").unlink(), "__2_0.distcp is missing"),
    "truncated": (lambda f: os.truncate(f / "__3_0.distcp", 100), "__3_0.distcp has 100 bytes instead of"),
    "flipped": (lambda f: flip(f / "__1_0.distcp"), "__1_0.distcp is damaged, its checksum differs"),
    "flipped state": (lambda f: flip(f / files.STATE), "state.pt is damaged"),
    "empty state": (  # which cannot be parsed either
        lambda f: (f / files.STATE).write_bytes(bytes((f / files.STATE).stat().st_size)),
        "state.pt is damaged",
    ),
    "foreign file": (lambda f: (f / "notes.txt").write_text(""), "notes.txt is not part of this checkpoint"),
    "no manifest": (lambda f: (f / files.MANIFEST).unlink(), "has no copus.json"),
    "not JSON": (lambda f: (f / files.MANIFEST).write_text("{"), "copus.json cannot be read"),
    "other format": (
        lambda f: edit_manifest(f, lambda m: m.update(format="x/2")),
        "its format is not copus-checkpoint/1",
    ),
    "not a folder": (lambda f: (shutil.rmtree(f), f.write_text("")), "is a file, not a folder"),
    "nothing": (lambda f: shutil.rmtree(f), "does not exist"),
    "surplus key": (add_key, ".metadata holds 'intruder'"),
    "surplus parameter": (
        lambda f: edit_manifest(f, lambda m: m["tensors"].update(intruder=[3])),
        "it has a parameter 'intruder' that this model has not",
    ),
    "missing parameter": (
        lambda f: edit_manifest(f, lambda m: m["tensors"].pop("model.norm.weight")),
        "it has no parameter 'model.norm.weight'",
    ),
    "other shape": (
        lambda f: edit_manifest(f, lambda m: m["tensors"].update({"lm_head.weight": [98, 32]})),
        "the shape of 'lm_head.weight' is [98, 32] there and [97, 32] here",
    ),
    "other grouping": (
        lambda f: edit_manifest(f, lambda m: m["optimizer"]["groups"].reverse()),
        "in another param group than the optimizer",
    ),
}


def save_one(path: str) -> None:
    with running(DP2TP2, UNTIED, micro_batch_size=4) as (engine, checkpointer):
        tiny.train(engine, batches(0, 1))
        checkpointer.save(path)


def refusals(
    paths: dict[str, str], good: str, other: str
) -> tuple[dict[str, tuple[str, list[str]]], list[str]]:
    """What each load says, and what it changed; and the warnings at one that is not refused."""
    found = {}
    with running(PP4, UNTIED, micro_batch_size=4) as (engine, checkpointer):
        diverge(engine)
        before = tiny.state(engine)
        for name, path in paths.items():
            try:
                checkpointer.load(path)
            except ValueError as error:
                found[name] = (str(error), tiny.differences(before, tiny.state(engine)))

        def refuse(manifest: Manifest, state: Any) -> None:
            raise KeyError("no scheduler") if engine.rank == 3 else ValueError("of no interest")

        try:
            checkpointer.load(good, check=refuse)
        except (KeyError, ValueError) as error:
            found["the caller's check"] = (str(error), tiny.differences(before, tiny.state(engine)))
        with pytest.MonkeyPatch.context() as patch:
            if engine.rank == 2:
                broken = CheckpointException("broken", {0: (OSError("stale file handle"), StackSummary())})
                patch.setattr(dcp, "load", Mock(side_effect=broken))
            try:
                checkpointer.load(good)
            except CheckpointFailed as error:
                found["a disk"] = (str(error), tiny.differences(before, tiny.state(engine)))
        for _ in range(2):  # the group of all ranks is made anew after a failure
            with pytest.raises(CheckpointFailed, match="rank 0 failed in phase 'load: path'"):
                checkpointer.load(None if engine.rank == 0 else good)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            checkpointer.load(good if engine.rank == 0 else None)  # type: ignore[arg-type]  # rank 0's counts
            checkpointer.load(other)
        warned = [str(w.message) for w in seen if "the model's config" in str(w.message)]
    for name, model, kind in (
        ("other model", TIED, "adamw"),
        ("other heads", Tiny(n_heads=8, n_kv_heads=8), "adamw"),  # of the same shapes
        ("other optimizer", UNTIED, "sgd"),
    ):
        with running(PP4, model, kind, micro_batch_size=4) as (engine, checkpointer):
            before = tiny.state(engine)
            try:
                checkpointer.load(good)
            except ValueError as error:
                found[name] = (str(error), tiny.differences(before, tiny.state(engine)))
    return found, warned


def test_what_is_not_a_whole_checkpoint_of_this_model_is_refused_and_nothing_overwritten(
    world: World, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    world.run(save_one, str(good))
    paths = {}
    for name, (spoil, _) in SPOILT.items():
        path = tmp_path / name
        shutil.copytree(good, path)
        spoil(path)
        paths[name] = str(path)
    other = tmp_path / "other epsilon"
    shutil.copytree(good, other)
    edit_manifest(other, lambda m: m["model"]["config"].update(rms_norm_eps=0.125))
    by_rank = world.run(refusals, paths, str(good), str(other), timeout=240)
    expected = {name: text for name, (_, text) in SPOILT.items()} | {
        "the caller's check": "of no interest",
        "a disk": "rank 2 failed in phase 'load: read' of a checkpoint: OSError: stale file handle",
        "other model": "it has a parameter 'lm_head.weight' that this model has not",
        "other heads": "its n_heads is 4, not 8",
        "other optimizer": "holds the state of AdamW, the optimizer is SGD",
    }
    assert [len(warned) for _, warned in by_rank] == [1, 0, 0, 0]
    assert "was saved with rms_norm_eps=0.125 in the model's config, here it is 1e-06" in by_rank[0][1][0]
    for found, _ in by_rank:
        assert found == by_rank[0][0], "all ranks say the same"
        assert found.keys() == expected.keys()
        for name, (message, changed) in found.items():
            assert expected[name] in message and "\n" not in message
            assert not changed, name

    # A resume passes over what is visibly not whole, however new.
    run = tmp_path / "run"
    for number, name in enumerate(("good", "missing", "truncated", "no manifest")):
        shutil.copytree(tmp_path / name, run / name)
        if name != "no manifest":
            edit_manifest(run / name, lambda m, number=number: m.update(saved_at=number))
    shutil.copytree(good, run / ".newer.saving")
    with pytest.warns(UserWarning, match="passed over: ") as warned_of:
        assert newest(run) == run / "good"
    assert len(warned_of) == 2, "there is nothing to say of what is no checkpoint"
    for name in ("missing", "truncated"):
        shutil.rmtree(run / name)
    (run / "good").rename(run / ".good.previous")
    assert newest(run) == run / "good" and files.resolve(run / "good") == run / ".good.previous"
    assert newest(tmp_path / "nowhere") is None

    edit_manifest(good, lambda m: m.update(saved_at=2e9))  # by a clock far ahead
    world.run(save_one, str(tmp_path / "later"))
    assert Manifest.read(tmp_path / "later").saved_at > 2e9


# -- interrupted saves -------------------------------------------------------------------------------------


def watched(path: str) -> list[tuple[str, int, bool]]:
    """During each phase of a save that replaces a checkpoint: which one a resume would read, and if it is sound."""
    seen = []

    def look(phase: str) -> None:
        folder = files.resolve(path)
        manifest = Manifest.read(folder)
        files.check_files(folder, manifest)
        seen.append((phase, manifest.labels["number"], newest(Path(path).parent) == Path(path)))

    with running(DP4, micro_batch_size=2) as (engine, checkpointer):
        checkpointer.save(path, labels={"number": 1})
        engine.fault = look
        checkpointer.save(path, labels={"number": 2})
        look("after")
    return seen


def test_in_every_phase_of_a_save_there_is_a_whole_checkpoint(world: World, tmp_path: Path) -> None:
    by_rank = world.run(watched, str(tmp_path / "checkpoint"))
    phases = ["stage", "write", "describe", "complete", "between"]
    assert by_rank[0] == [*((f"save: {phase}", 1, True) for phase in phases), ("after", 2, True)]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "nothing is left"


def failed_saves(path: str) -> list[str]:
    """Errors of saves that fail on one rank, in each phase; each time the run and the next save go on."""
    found = []
    with running(TP2PP2, micro_batch_size=2) as (engine, checkpointer):
        for number, (phase, rank) in enumerate(
            [("stage", 2), ("write", 2), ("describe", 1), ("complete", 0), ("between", 0)]
        ):
            checkpointer.save(path, labels={"number": number})

            def fail(now: str, phase: str = phase, rank: int = rank) -> None:
                if now == f"save: {phase}" and engine.rank == rank:
                    raise OSError("no space left on device")

            engine.fault = fail
            try:
                checkpointer.save(path, labels={"number": -1})
            except CheckpointFailed as error:
                found.append(error.reason)
            engine.fault = lambda phase: None
            tiny.train(engine, batches(0, 1))
            dist.barrier()
            assert Manifest.read(files.resolve(path)).labels["number"] == number
            dist.barrier()
        try:
            checkpointer.save(path, {"not for a file": lambda: None})
        except CheckpointFailed as error:
            found.append(error.reason)
        try:
            checkpointer.save(Path(path).parent)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_run_goes_on(world: World, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("")
    by_rank = world.run(failed_saves, str(tmp_path / "checkpoint"), timeout=240)
    assert all(found == by_rank[0] for found in by_rank)
    for rank, message in zip([2, 2, 1, 0, 0], by_rank[0], strict=False):
        assert f"rank {rank} failed" in message and "no space left on device" in message
    assert "rank 0 failed in phase 'save: stage'" in by_rank[0][5]
    assert "holds files that are not a checkpoint: choose another path" in by_rank[0][6]
    assert len(by_rank[0]) == 7


# -- while training goes on --------------------------------------------------------------------------------


def overlapped(directory: str) -> dict[str, Any]:
    """Trains while a checkpoint is being written."""
    written = threading.Event()
    found: dict[str, Any] = {}
    with running(DP2TP2, micro_batch_size=4) as (engine, checkpointer):
        tiny.train(engine, batches(0, 1))
        before = tiny.state(engine)

        def hold(phase: str) -> None:
            if phase == "save: write":
                assert written.wait(60)

        engine.fault = hold
        checkpointer.save(f"{directory}/1", {"number": 1}, asynchronous=True)
        tiny.train(engine, batches(1, 3))
        engine.switch(Configuration(PP4, 8, 2))
        tiny.train(engine, batches(3, 4))
        found["while it was written"] = newest(directory)
        written.set()

        def fail(phase: str) -> None:
            if phase == "save: write" and engine.rank == 1:
                raise OSError("no space left on device")

        engine.fault = fail
        checkpointer.save(f"{directory}/2", asynchronous=True)
        found["once the second has begun"] = newest(directory)
        tiny.train(engine, batches(4, 5))
        try:
            checkpointer.save(f"{directory}/3")
        except CheckpointFailed as error:
            found["error of the second"] = error.reason
        engine.fault = lambda phase: None
        checkpointer.save(f"{directory}/4", asynchronous=True)
        checkpointer.wait()
        counts = []
        for _ in range(2):
            checkpointer.save(f"{directory}/4", asynchronous=True)
            checkpointer.load(f"{directory}/1")
            process = psutil.Process()
            n_groups = len(dist.distributed_c10d._world.pg_map)
            counts.append((n_groups, process.num_threads(), process.num_fds()))
        found["resources"] = counts
        found["differences"] = tiny.differences(before, tiny.state(engine))
    return found


def test_what_is_written_while_training_goes_on_is_the_state_at_the_call(
    world: World, tmp_path: Path
) -> None:
    for found in world.run(overlapped, str(tmp_path)):
        assert found["while it was written"] is None
        assert found["once the second has begun"] == tmp_path / "1", "a second save waits for the first"
        assert "rank 1 failed: OSError: no space left on device" in found["error of the second"]
        assert not found["differences"]
        assert found["resources"][0] == found["resources"][1]
    assert {path.name for path in tmp_path.iterdir()} == {"1", "4"}
