"""Training over switches: the same loss curve as without, and nothing that grows."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from world import World

from copus_lightning.core.layout import Configuration, Layout

from . import tiny
from .tiny import N_SAMPLES, TIED, UNTIED, Tiny

DP4, TP2DP2, PP2TP2, PP4 = Layout(data=4), Layout(2, 2, 1), Layout(1, 2, 2), Layout(pipeline=4)
TOUR = [DP4, TP2DP2, PP2TP2, PP4, DP4]
STEPS_BETWEEN = 3
N_STEPS = STEPS_BETWEEN * len(TOUR)
CLIP = 0.5


def batches() -> list[tiny.Batch]:
    return [tiny.make_batch("counting", seed) for seed in range(N_STEPS)]


def configuration(layout: Layout) -> Configuration:
    """Two micro-batches in a pipeline, else one: few messages, for speed."""
    per_rank = N_SAMPLES // layout.data
    return Configuration(layout, N_SAMPLES, per_rank // 2 if layout.pipeline > 1 else per_rank)


def curve(layouts: Sequence[Layout], model: Tiny, kind: str, settings: dict[str, Any]) -> list[float]:
    """Losses of a run that goes to the next layout every `STEPS_BETWEEN` steps."""
    micro = configuration(layouts[0]).micro_batch_size
    losses = []
    with tiny.running(layouts[0], model, kind, micro_batch_size=micro, **settings) as engine:
        for index, batch in enumerate(batches()):
            wanted = configuration(layouts[index // STEPS_BETWEEN % len(layouts)])
            if wanted != engine.configuration:
                engine.switch(wanted)
            losses += tiny.train(engine, [batch])
    return losses


def curves(
    runs: list[Sequence[Layout]], model: Tiny, kind: str, settings: dict[str, Any]
) -> list[list[float]]:
    """The curve of one process first, then those of the runs."""
    alone = tiny.train_alone(kind, batches(), CLIP, model)
    return [alone, *(curve(run, model, kind, settings) for run in runs)]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "model", "zero_stage"),
    [
        ("adamw", TIED, 1),
        ("sgd", UNTIED, 0),
        ("lion", UNTIED, 1),
        ("adamw", Tiny(family="qwen3", options=(("head_dim", 8),)), 1),
    ],
    ids=["adamw", "sgd", "lion", "qwen3"],
)
def test_the_loss_curve_is_that_of_the_run_that_never_switches(
    world: World, kind: str, model: Tiny, zero_stage: int
) -> None:
    settings = {"zero_stage": zero_stage, "gradient_clip_norm": CLIP}
    by_rank = world.run(curves, [[DP4], TOUR], model, kind, settings, timeout=120)
    alone, unswitched, switched = by_rank[0]
    assert all(found == by_rank[0] for found in by_rank), "the loss is equal on all ranks"
    assert distance(unswitched, alone) < 1e-4
    assert distance(switched, unswitched) < 1e-4
    assert alone[-1] < alone[0] - 0.1, "it trains"


def test_in_bf16_switches_add_no_more_than_the_choice_of_layout_does(world: World) -> None:
    settings = {"zero_stage": 1, "dtype": torch.bfloat16, "gradient_clip_norm": CLIP}
    runs: list[Sequence[Layout]] = [[DP4], [TP2DP2], [PP2TP2], TOUR]
    alone, *unswitched, switched = world.run(curves, runs, UNTIED, "adamw", settings, timeout=120)[0]
    between_layouts = max(distance(one, other) for one in unswitched for other in unswitched)
    assert 0 < between_layouts < 0.05, "rounding, not another run"
    # Each distance is the largest of fifteen roundings, so by chance two of them differ by a factor of two.
    for one in unswitched:
        assert distance(switched, one) <= 2 * between_layouts
    assert distance(switched, alone) < 0.05


class Resources(NamedTuple):
    """What a rank holds."""

    groups: int
    threads: int
    descriptors: int


def resources_by_round(n_rounds: int, cache_groups: bool) -> list[Resources]:
    """After each round of switches over four layouts, with a measured step in each."""
    layouts = [DP4, TP2DP2, Layout(2, 1, 2), PP4]
    found = []
    with tiny.running(layouts[-1], TIED, micro_batch_size=2, cache_groups=cache_groups) as engine:
        for _ in range(n_rounds):
            for layout in layouts:
                engine.switch(configuration(layout))
                engine.measure_next = True
                tiny.train(engine, [tiny.make_batch()])
            gc.collect()
            dist.barrier()
            process = psutil.Process()
            n_groups = len(dist.distributed_c10d._world.pg_map)
            found.append(Resources(n_groups, process.num_threads(), process.num_fds()))
    return found


@pytest.mark.parametrize("cache_groups", [True, False], ids=["kept", "released"])
def test_groups_threads_and_descriptors_stay_constant(world: World, cache_groups: bool) -> None:
    for rank, found in enumerate(world.run(resources_by_round, 4, cache_groups)):
        assert len(set(found[2:])) == 1, f"rank {rank}: {found}"


def batch_changes() -> list[bool]:
    """Whether the same engine is alive after each change of batch or micro-batch."""
    found = []
    for layout in (DP4, PP2TP2):
        with tiny.running(layout, UNTIED, micro_batch_size=2) as engine:
            live = engine.live
            for n_samples, micro in ((16, 4), (8, 1), (8, 2)):
                report = engine.switch(Configuration(layout, n_samples, micro))
                tiny.train(engine, [tiny.make_batch(n_samples=n_samples)])
                found.append(engine.live is live and not report.layout_changed and report.bytes_moved == 0)
    return found


def test_a_change_of_batch_rebuilds_nothing(world: World) -> None:
    assert all(all(found) for found in world.run(batch_changes))
