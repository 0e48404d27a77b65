"""What a switch carries: every bit of weights and optimizer state, and no byte more than needed."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from world import World

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine.engine import SwitchReport
from copus_lightning.engine.state import StateMap
from copus_lightning.engine.transfer import rounds

from . import tiny
from .tiny import LAYOUTS, N_SAMPLES, TIED, UNTIED, Tiny

N_SWITCHES = 10


def chain(start: Layout, seed: int) -> list[Layout]:
    """Random layouts from `start` to `start` again, each another than the one before."""
    chance = random.Random(seed)
    layouts = [start]
    while len(layouts) < N_SWITCHES:
        last = len(layouts) == N_SWITCHES - 1
        layouts.append(
            chance.choice([x for x in LAYOUTS[4] if x != layouts[-1] and not (last and x == start)])
        )
    return [*layouts, start]


class Carried(NamedTuple):
    """What one rank saw of a chain of switches."""

    lost: list[str]
    lost_after_next_step: list[str]
    evaluations: list[float]
    decays: list[tuple[float, float]]
    reports: list[SwitchReport]
    state_map: StateMap
    n_states: list[int]


def carry(layouts: list[Layout], model: Tiny, kind: str, n_steps: int, settings: dict[str, Any]) -> Carried:
    """Steps, a chain of switches and one step more; and the same without the chain."""
    batches = [tiny.make_batch("uneven", seed) for seed in range(n_steps + 1)]
    with tiny.running(layouts[0], model, kind, **settings) as engine:
        tiny.train(engine, batches)
        unswitched = tiny.state(engine)
    with tiny.running(layouts[0], model, kind, **settings) as engine:
        tiny.train(engine, batches[:-1])
        held_out = tiny.share(engine, batches[0])
        before, evaluations = tiny.state(engine), [engine.evaluate(held_out)[0].item()]
        reports = []
        for layout in layouts[1:]:
            reports.append(engine.switch(Configuration(layout, N_SAMPLES, 1)))
        lost = tiny.differences(before, tiny.state(engine))
        evaluations.append(engine.evaluate(held_out)[0].item())
        user, local = engine.assembler.handle.optimizer, engine.live.optimizer
        decays = [
            (user.param_groups[index]["weight_decay"], group["weight_decay"])
            for index, group in zip(local.user_groups, local.torch_optimizer.param_groups, strict=True)
        ]
        tiny.train(engine, batches[-1:])
        lost_after = tiny.differences(unswitched, tiny.state(engine))
        n_states = [1 + len(schema.elementwise) for schema in engine.assembler.handle.schemas]
        return Carried(lost, lost_after, evaluations, decays, reports, engine.assembler.state_map, n_states)


def ownership(state_map: StateMap, layout: Layout, rank: int) -> dict[int, torch.Tensor]:
    """Which elements of each tensor a rank has, as a mask of the tensor's matrix view."""
    masks = {}
    for piece in state_map.pieces(layout, rank):
        tensor = state_map.tensors[piece.tensor]
        low, high = tensor.shard_columns(layout.tensor, layout.coordinates(rank).tensor)
        mask = torch.zeros(tensor.matrix_shape, dtype=torch.bool)
        shard = mask[:, low:high].clone().view(-1)
        shard[piece.flat_start : piece.flat_stop] = True
        mask[:, low:high] = shard.view(-1, high - low)
        masks[piece.tensor] = mask
    return masks


def needed_bytes(state_map: StateMap, source: Layout, target: Layout, n_states: list[int]) -> int:
    """Bytes that ranks have under `target` and not under `source`, element by element."""
    total = 0
    for rank in range(source.world_size):
        before, after = (ownership(state_map, layout, rank) for layout in (source, target))
        for index, mask in after.items():
            missing = mask & ~before[index] if index in before else mask
            total += int(missing.sum()) * 4 * n_states[state_map.tensors[index].group]
    return total


def check(by_rank: list[Carried], layouts: list[Layout], *, stepped: bool = True) -> None:
    for carried in by_rank:
        assert carried.lost == []
        assert carried.lost_after_next_step == []
        assert carried.evaluations[0] == carried.evaluations[1]
        assert carried.decays and all(user == local for user, local in carried.decays)
    first = by_rank[0]
    n_states = first.n_states if stepped else [1] * len(first.n_states)
    for index, (source, target) in enumerate(pairwise(layouts)):
        bound = needed_bytes(first.state_map, source, target, n_states)
        for carried in by_rank:
            report = carried.reports[index]
            assert (report.source.layout, report.target.layout) == (source, target) and report.layout_changed
            assert report.bytes_moved == report.bytes_lower_bound == bound, f"{source} to {target}"


CASES = [
    (kind, zero_stage, dtype)
    for kind in ("adamw", "sgd", "lion")
    for zero_stage in (0, 1)
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(
    ("kind", "zero_stage", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch.")
)
def test_a_chain_of_switches_loses_no_bit(
    world: World, kind: str, zero_stage: int, dtype: torch.dtype
) -> None:
    case = CASES.index((kind, zero_stage, dtype))
    layouts = chain([Layout(data=4), Layout(data=2, pipeline=2), Layout(pipeline=4)][case % 3], seed=case)
    settings = {"zero_stage": zero_stage, "dtype": dtype, "one_by_one": case % 3 == 1}
    if case % 2:
        settings["buffer_bytes"] = 1000  # pieces travel in many parts
    by_rank = world.run(carry, layouts, TIED if case % 4 < 2 else UNTIED, kind, 1, settings)
    check(by_rank, layouts)


def test_before_the_first_step_weights_travel_alone(world: World) -> None:
    layouts = chain(Layout(data=4), seed=100)
    check(world.run(carry, layouts, TIED, "adamw", 0, {}), layouts, stepped=False)


@pytest.mark.parametrize("world_size", range(1, 10))
def test_every_pair_of_ranks_meets_once_and_no_one_waits_for_ever(world_size: int) -> None:
    waiting = {rank: list(rounds(world_size, rank)) for rank in range(world_size)}
    for rank, peers in waiting.items():
        assert sorted(peers) == [peer for peer in range(world_size) if peer != rank]
    while any(waiting.values()):
        heads = {rank: peers[0] for rank, peers in waiting.items() if peers}
        met = [rank for rank, peer in heads.items() if heads.get(peer) == rank]
        assert met, f"nobody can go on: {heads}"
        for rank in met:
            waiting[rank].pop(0)
