"""`copus fit` that is pre-empted or loses a rank and goes on, and `copus export` of what it left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import commands
import psutil
import pytest

from copus_lightning.cli import fit, main
from copus_lightning.core.records import read_events, read_metrics
from copus_lightning.engine.checkpoint_format import Manifest, newest

CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 257}
data: {kind: bytes, sequence_length: 32}
schedule: {kind: constant, warmup_tokens: 500}
run: {run_dir: run, accelerator: cpu, devices: 2, max_tokens: 100_000_000, validation_batches: 1, loggers: [],
      checkpoint_every_tokens: 600, resume: auto}
parallel: {layout: dp1-tp1-pp2, global_batch_size: 4}
copus: {policy: ramp, ramp: "0:4 1500:8", global_batch_sizes: [4, 8], decide_every_tokens: 100}
"""

LOST = """
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 257}
data: {kind: bytes, sequence_length: 32}
schedule: {kind: constant, warmup_tokens: 500}
run: {accelerator: cpu, devices: 2, max_tokens: 12_400, validation_batches: 1, loggers: [],
      checkpoint_every_tokens: 2480, resume: auto}
parallel: {layout: dp2-tp1-pp1, global_batch_size: 4, timeout_seconds: 30}
copus: {policy: static}
"""
"""100 steps of 4 samples, with a checkpoint after every 20."""


COPUS = ("copus_lightning.cli", "fit", "--config", "tiny.yaml")


class Lost(NamedTuple):
    """A run that lost its second rank, and what went on from it."""

    returncode: int | None
    errors: str
    ending_seconds: float
    n_rows: int
    saved: Path | None
    resumed: subprocess.CompletedProcess[str]


class Runs(NamedTuple):
    """Runs that began with the module's first test: while some wait, others work."""

    folder: Path
    preempted: Future[subprocess.CompletedProcess[str]]
    lost: Future[Lost]
    uninterrupted: Future[list[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("resume")
    for name, text in {"preempted": CONFIG, "lost": LOST}.items():
        (folder / name).mkdir()
        (folder / name / "tiny.yaml").write_text(text)
    commands.forks()  # here, not in the threads
    with ThreadPoolExecutor(2) as executor:
        yield Runs(
            folder,
            executor.submit(preempted, folder / "preempted"),
            executor.submit(lost, folder / "lost"),
            executor.submit(uninterrupted, folder / "lost"),
        )


def preempted(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run that got SIGTERM after 20 steps, on its first rank alone."""
    with commands.Command(*COPUS, cwd=folder) as command:
        deadline = time.monotonic() + 240
        while not (folder / "run/metrics.csv").exists() or len(read_metrics(folder / "run")) < 20:
            assert time.monotonic() < deadline and command.poll() is None, command.done(0)
            time.sleep(0.1)
        os.kill(command.pid, signal.SIGTERM)
        return command.done(120)


def lost(folder: Path) -> Lost:
    """A run whose second rank is killed some steps after a checkpoint; and another that goes on from there."""
    children: list[psutil.Process] = []
    run_dir = folder / "run"
    with commands.Command(*COPUS, "run.run_dir=run", cwd=folder) as command:
        try:
            deadline = time.monotonic() + 120
            while (saved := newest(run_dir / "checkpoints")) is None or len(read_metrics(run_dir)) < int(
                saved.name.removeprefix("step-")
            ) + 10:
                assert time.monotonic() < deadline and command.poll() is None, command.done(0)
                time.sleep(0.02)
            children = psutil.Process(command.pid).children(recursive=True)
            (second,) = [child for child in children if child.environ().get("LOCAL_RANK") == "1"]
            second.kill()
            lost_at = time.monotonic()
            done = command.done(60)
            ending_seconds = time.monotonic() - lost_at
        finally:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    n_rows, saved = len(read_metrics(run_dir)), newest(run_dir / "checkpoints")
    resumed = commands.run(*COPUS, "run.run_dir=run", cwd=folder)
    return Lost(done.returncode, done.stderr, ending_seconds, n_rows, saved, resumed)


def uninterrupted(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """The same run to its end, on ranks that a launcher like torchrun has started; each rank's outcome."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        ranks = [
            commands.Command(
                *COPUS,
                "run.run_dir=uninterrupted",
                cwd=folder,
                environment={**world, "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in ("0", "1")
        ]
        for rank in ranks:
            stack.enter_context(rank)
        return [rank.done(120) for rank in ranks]


@pytest.fixture(scope="module")
def folder(runs: Runs) -> Path:
    """Of the run that was pre-empted."""
    done = runs.preempted.result()
    assert done.returncode == 0, done.stderr
    assert "pre-empted: go on with run.resume=auto" in done.stdout
    return runs.folder / "preempted"


def test_a_run_that_is_pre_empted_saves_and_goes_on_where_it_was(folder: Path) -> None:
    rows = read_metrics(folder / "run")
    checkpoints = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
    assert len(checkpoints) == 2 and checkpoints[-1] == f"step-{rows[-1]['step']:08d}", (
        "the last two are kept"
    )
    assert json.loads((folder / "run/summary.json").read_text())["ended_by"] == "preemption"
    before = rows[-1]

    overrides = [f"run.max_tokens={before['tokens'] + 2000}", "parallel.layout=dp2-tp1-pp1"]
    done = commands.run(*COPUS, *overrides, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"goes on from run/checkpoints/{checkpoints[-1]} in" in done.stdout
    every_row = read_metrics(folder / "run", every_row=True)
    assert [row["step"] for row in every_row] == list(range(1, len(every_row) + 1)), "no step was made twice"
    later = every_row[len(rows) :]
    assert {row["layout"] for row in rows} == {"dp1-tp1-pp2"}
    assert {row["layout"] for row in later} == {"dp2-tp1-pp1"}
    assert later[0]["global_batch_size"] == before["global_batch_size"] == 8, "the ramp goes on where it was"
    assert later[0]["samples"] == before["samples"] + 8 and later[0]["tokens"] == before["tokens"] + 8 * 31
    assert later[0]["seconds"] > before["seconds"]
    assert later[0]["loss"] == pytest.approx(before["loss"], abs=0.7)
    kinds = [event["kind"] for event in read_events(folder / "run")]
    assert kinds.count("resumed") == 1 and kinds.count("end") == 2
    last = newest(folder / "run/checkpoints")
    assert last is not None and last.name == f"step-{every_row[-1]['step']:08d}", "the end is saved too"
    assert not list((folder / "run").glob("earlier-*"))


def test_export_writes_a_hugging_face_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(newest(folder / "run/checkpoints"))
    assert main(["export", checkpoint, str(folder / "exported"), "--dtype", "bfloat16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    config = json.loads((folder / "exported/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    for arguments, words in [
        ([checkpoint, str(folder / "exported")], "is not an empty folder"),
        ([str(folder / "run"), str(folder / "new")], "has no copus.json"),
        ([checkpoint, str(folder / "new"), "--dtype", "int8"], "dtype='int8' is not known"),
        ([checkpoint, str(folder / "new"), "surplus"], "unexpected word surplus"),
        ([checkpoint], "the following arguments are required: OUT"),
    ]:
        assert main(["export", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_launched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    checkpoint = newest("run/checkpoints")
    assert checkpoint is not None
    broken = folder / "broken"
    shutil.copytree(checkpoint, broken, dirs_exist_ok=True)
    content = json.loads((broken / "copus.json").read_text())
    (broken / "copus.json").write_text(json.dumps({**content, "format": "other"}))
    for overrides, words in [
        (["model.hidden_size=64"], "is of another model, its hidden_size is 32 and not 64"),
        ([f"run.resume={broken}"], "run.resume: "),
        ([f"run.resume={folder}"], "has no copus.json"),
    ]:
        assert main(["fit", "--config", "tiny.yaml", *overrides]) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
    assert Manifest.read(checkpoint).training["world_size"] == 2


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> Path:
    """Those of the run that was pre-empted, copied with its folder, and the newest one damaged."""
    copied = folder.with_name("damaged")
    shutil.copytree(folder, copied)
    newest_one = newest(copied / "run/checkpoints")
    assert newest_one is not None
    damage(newest_one)
    return copied / "run/checkpoints"


def damage(checkpoint: Path) -> None:
    """Spoils contents, and no sizes."""
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))


ALONE = ("run.devices=1", "parallel.layout=dp1-tp1-pp1")


def test_a_damaged_checkpoint_is_passed_over_and_a_last_save_that_fails_is_said(checkpoints: Path) -> None:
    older, damaged = sorted(checkpoints.iterdir())
    rest = checkpoints / ".step-00000001.saving"
    rest.mkdir()
    (rest / "__0_0.distcp").write_bytes(b"begun")
    foreign = checkpoints / "step-by-hand"
    foreign.mkdir()
    n_steps = 4  # of 248 tokens: there is a save on the way, and the one at the end
    last = int(older.name.removeprefix("step-")) + n_steps
    (checkpoints / f".step-{last:08d}.saving").write_text("in the way")
    tokens = next(row["tokens"] for row in read_metrics(checkpoints.parent) if row["step"] == last - n_steps)

    done = commands.run(
        *COPUS, *ALONE, f"run.max_tokens={tokens + n_steps * 248}", cwd=checkpoints.parents[1]
    )
    assert done.returncode == 1, done.stderr
    assert f"goes on from run/checkpoints/{older.name} in" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("copus: ") and "File exists" in line
    events = read_events(checkpoints.parent)
    (refused,) = [event for event in events if event["kind"] == "checkpoint_refused"]
    assert refused["path"].endswith(damaged.name) and "its checksum differs" in refused["reason"]
    assert [event["kind"] for event in events][-2:] == ["checkpoint_failed", "end"]
    foreign.rmdir()  # it is no checkpoint of this run, and was left alone
    assert not rest.exists(), "what an interrupted save has left is removed"
    summary = json.loads((checkpoints.parent / "summary.json").read_text())
    assert summary["ended_by"] == "max_tokens" and summary["steps"] == last
    assert not list(checkpoints.parent.glob("earlier-*"))


def test_what_the_run_before_saves_while_this_one_is_checked_is_not_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = folder.with_name("last-moment")
    shutil.copytree(folder, last)
    monkeypatch.chdir(last)
    saved = Path("run/checkpoints").rename("elsewhere")

    def leave(run_dir: Path) -> None:
        saved.rename(run_dir / "checkpoints")

    monkeypatch.setattr(fit, "claim", leave)
    ready = fit.prepare(Namespace(config="tiny.yaml", overrides=[]))
    assert ready.resume == newest("run/checkpoints") and ready.resume is not None


def test_where_no_checkpoint_can_be_read_nothing_begins_and_nothing_is_set_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unreadable = folder.with_name("unreadable")
    shutil.copytree(folder, unreadable)
    monkeypatch.chdir(unreadable)
    saved = sorted(Path("run/checkpoints").glob("step-*"))
    assert len(saved) == 2
    for path in saved:
        damage(path)
    n_rows = len(read_metrics("run"))
    done = commands.run(*COPUS, *ALONE, cwd=unreadable)
    assert done.returncode == 2 and not list(Path("run").glob("earlier-*"))
    (line,) = done.stderr.splitlines()
    assert line.startswith("copus: ") and "is damaged, its checksum differs" in line
    refused = [event["path"] for event in read_events("run") if event["kind"] == "checkpoint_refused"]
    assert sorted(refused[-2:]) == [str(path) for path in saved] and len(read_metrics("run")) == n_rows

    for path in saved:
        os.truncate(path / "__0_0.distcp", 10)
    before = sorted(Path("run").rglob("*"))
    assert main(["fit", "--config", "tiny.yaml"]) == 2
    message = capsys.readouterr().err
    assert "run.resume=auto: no checkpoint in run/checkpoints is whole" in message
    assert message.count("\n") == 1 and sorted(Path("run").rglob("*")) == before


def test_a_run_that_loses_a_rank_says_so_and_goes_on_as_if_nothing_had_been(runs: Runs) -> None:
    lost, folder = runs.lost.result(), runs.folder / "lost"
    assert lost.returncode == 1 and lost.ending_seconds < 30, (lost.returncode, lost.ending_seconds)
    (line,) = lost.errors.splitlines()
    assert line.startswith("copus: rank 1 stopped answering") and "run.resume=auto" in line
    assert lost.n_rows < 100, "it was lost in the middle"

    assert lost.resumed.returncode == 0, lost.resumed.stderr
    assert lost.saved is not None
    assert f"goes on from run/checkpoints/{lost.saved.name} in" in lost.resumed.stdout
    for rank in runs.uninterrupted.result():
        assert rank.returncode == 0, rank.stderr
    rows, expected = read_metrics(folder / "run"), read_metrics(folder / "uninterrupted")
    assert len(read_metrics(folder / "run", every_row=True)) > 100, "some steps were made again"
    for found in (rows, expected):
        assert [row["step"] for row in found] == list(range(1, 101))
        assert [row["samples"] for row in found] == list(range(4, 401, 4))
    losses = [row["loss"] for row in expected]
    moves = [abs(a - b) for a, b in itertools.pairwise(losses)]
    assert statistics.median(moves) > 1e-2, "other samples would show"
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-4)
