"""The exchange plan: exact, at the lower bound, the same on both ends, evenly spread, and fast."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from copus_lightning.core.layout import Layout, enumerate_layouts
from copus_lightning.engine.exchange import ExchangePlan, Move, View, merge, missing_elements, plan
from copus_lightning.engine.sources import share_out
from copus_lightning.engine.state import LogicalTensor, StateMap

from .test_state import flat_groups, random_layout, random_state_map

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan.py"


def all_plans(
    state_map: StateMap, source: Layout, target: Layout, ranks_per_node: int | None = None
) -> list[ExchangePlan]:
    return [plan(state_map, source, target, rank, ranks_per_node) for rank in range(source.world_size)]


def piece_storages(state_map: StateMap, layout: Layout, rank: int) -> list[np.ndarray]:
    """The flat storage of each of a rank's pieces, holding the numbers of its elements."""
    groups = flat_groups(state_map, layout, rank)
    return [
        groups[piece.group][piece.group_offset : piece.group_offset + piece.numel].copy()
        for piece in state_map.pieces(layout, rank)
    ]


def view(storages: list[np.ndarray], move: Move, side: View) -> np.ndarray:
    storage = storages[side.piece]
    # as_strided reads beyond the storage without a word.
    last = side.offset + (move.shape[0] - 1) * side.stride + move.shape[1] - 1
    assert 0 <= side.offset <= last < storage.size
    step = storage.itemsize
    return as_strided(storage[side.offset :], move.shape, (side.stride * step, step))


def held_elements(state_map: StateMap, layout: Layout, rank: int) -> set[int]:
    return {int(e) for elements in flat_groups(state_map, layout, rank).values() for e in elements if e >= 0}


def check_exchange(
    state_map: StateMap, source: Layout, target: Layout, ranks_per_node: int | None = None
) -> list[ExchangePlan]:
    """Carry an exchange out on numbered elements and compare it with sets of elements."""
    world = range(source.world_size)
    plans = all_plans(state_map, source, target, ranks_per_node)
    old = [piece_storages(state_map, source, rank) for rank in world]
    needed = [piece_storages(state_map, target, rank) for rank in world]
    new = [[np.full_like(storage, -1) for storage in storages] for storages in needed]
    held = [held_elements(state_map, source, rank) for rank in world]

    def carry(move: Move, giver: int, taker: int) -> None:
        place = view(new[taker], move, move.target)
        assert (place == -1).all(), "an element arrives twice"
        place[:] = view(old[giver], move, move.source)

    for rank in world:
        mine = plans[rank]
        assert mine.rank == rank
        assert rank not in mine.sends and rank not in mine.receives
        assert list(mine.sends) == sorted(mine.sends) and list(mine.receives) == sorted(mine.receives)
        for move in mine.keeps:
            carry(move, rank, rank)
        for peer, moves in mine.receives.items():
            assert moves and plans[peer].sends[rank] == moves
            for move in moves:
                assert not held[rank].intersection(view(old[peer], move, move.source).ravel().tolist())
                carry(move, peer, rank)
        for peer, moves in mine.sends.items():
            assert moves and plans[peer].receives[rank] == moves
        wanted = held_elements(state_map, target, rank)
        assert mine.received_elements == len(wanted - held[rank])
        assert mine.kept_elements == len(wanted & held[rank])
        assert missing_elements(state_map, source, target, rank) == len(wanted - held[rank])
        if ranks_per_node:
            for peer, moves in mine.receives.items():
                near = set().union(*(held[r] for r in world if r // ranks_per_node == rank // ranks_per_node))
                if peer // ranks_per_node != rank // ranks_per_node:
                    for move in moves:
                        assert not near.intersection(view(old[peer], move, move.source).ravel().tolist())
    for got, expected in zip(new, needed, strict=True):
        for storage, elements in zip(got, expected, strict=True):
            assert np.array_equal(storage, elements)
    assert sum(p.sent_elements for p in plans) == sum(p.received_elements for p in plans)
    return plans


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("seed", range(60))
def test_random_exchanges_are_exact_and_at_the_lower_bound(seed: int, zero_stage: int) -> None:
    rng = random.Random(seed)
    state_map = random_state_map(rng, zero_stage)
    world_size = rng.randint(1, 8)
    source = random_layout(rng, world_size, state_map.n_layers)
    target = random_layout(rng, world_size, state_map.n_layers)
    check_exchange(state_map, source, target, rng.choice([None, 1, 2, 3, 4]))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_every_pair_of_four_rank_layouts(zero_stage: int) -> None:
    state_map = random_state_map(random.Random(7), zero_stage)
    layouts = [layout for layout in enumerate_layouts(4) if layout.pipeline <= state_map.n_layers]
    for source in layouts:
        for target in layouts:
            check_exchange(state_map, source, target)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_nothing_moves_between_equal_layouts(zero_stage: int) -> None:
    state_map = random_state_map(random.Random(3), zero_stage)
    layout = Layout(2, 2, 2)
    for mine in check_exchange(state_map, layout, layout, 2):
        assert not mine.sends and not mine.receives
        # Whole pieces, not crumbs: at most three rectangles of each.
        assert len(mine.keeps) <= 3 * len(state_map.pieces(layout, mine.rank))
        if zero_stage == 0:
            assert len(mine.keeps) == len(state_map.pieces(layout, mine.rank))


def test_replicas_with_different_partitions_on_each_tensor_rank() -> None:
    # 5 columns over 2 tensor ranks: the norm begins at another place in each rank's group, so that its copies
    # are cut in different places among the data ranks.
    tensors = (
        LogicalTensor("w", (7, 5), 1, 0),
        LogicalTensor("norm", (23,), None, 0),
        LogicalTensor("v", (5, 7), 0, 1),
    )
    state_map = StateMap(tensors, 2, 1, alignment=1)
    layout = Layout(3, 2, 1)
    cuts = [
        {
            (p.flat_start, p.flat_stop)
            for r in range(t, 6, 2)
            for p in state_map.pieces(layout, r)
            if p.tensor == 1
        }
        for t in range(2)
    ]
    assert cuts[0] != cuts[1]
    for target in enumerate_layouts(6):
        if target.pipeline <= 2:
            check_exchange(state_map, layout, target)
            check_exchange(state_map, target, layout, 2)


def test_a_rank_plans_the_same_whether_or_not_others_do() -> None:
    state_map = random_state_map(random.Random(1), 1)
    source, target = Layout(2, 2, 2), Layout(4, 1, 2)
    assert plan(state_map, source, target, 5) == all_plans(state_map, source, target)[5]


def uniform_state_map(n_layers: int, zero_stage: int) -> StateMap:
    tensors = [LogicalTensor("embed", (257, 48), 0, None, True)]
    for layer in range(n_layers):
        tensors += [
            LogicalTensor(f"{layer}.norm", (48,), None, layer, group=1),
            LogicalTensor(f"{layer}.q", (48, 48), 0, layer),
            LogicalTensor(f"{layer}.o", (48, 48), 1, layer),
            LogicalTensor(f"{layer}.up", (128, 48), 0, layer),
            LogicalTensor(f"{layer}.down", (48, 128), 1, layer),
        ]
    tensors.append(LogicalTensor("head", (257, 48), 0, None, False, True))
    return StateMap(tuple(tensors), n_layers, zero_stage)


def test_many_replicas_serve_many_ranks_evenly() -> None:
    # Each half of the model is held by 16 ranks and wanted by 16: everyone sends as much as it receives.
    state_map = uniform_state_map(12, 0)
    plans = all_plans(state_map, Layout(16, 1, 2), Layout(32, 1, 1))
    for half in (plans[:16], plans[16:]):
        sent = [p.sent_elements for p in half]
        assert max(sent) == min(sent) > 0


def test_few_replicas_serve_many_ranks_evenly() -> None:
    state_map = uniform_state_map(12, 0)
    plans = all_plans(state_map, Layout(6, 1, 4), Layout(24, 1, 1))
    for stage in range(4):
        sent = [p.sent_elements for p in plans[6 * stage : 6 * stage + 6]]
        assert max(sent) <= 1.01 * sum(sent) / 6


def test_shards_of_one_tensor_ask_different_replicas() -> None:
    # Ranks 0 to 23 hold layer 5, ranks 24 to 31 want a shard of it each: nobody has to send two.
    state_map = StateMap((LogicalTensor("up", (256, 8), 0, 5),), 12, 0)
    plans = all_plans(state_map, Layout(24, 1, 2), Layout(2, 8, 3))
    assert sorted(p.sent_elements for p in plans) == [0] * 40 + [256] * 8


def test_like_tensors_ask_different_replicas() -> None:
    # Ranks 0 to 5 hold layer 4, ranks 6 and 7 want all of it: six tensors, so that everyone can send two.
    tensors = tuple(LogicalTensor(name, (8, 8), None, 4) for name in "abcdef")
    plans = all_plans(StateMap(tensors, 12, 0), Layout(6, 1, 2), Layout(4, 1, 3))
    assert [p.sent_elements for p in plans] == [2 * 64] * 6 + [0] * 6


@pytest.mark.parametrize("seed", range(12))
def test_no_rank_sends_much_more_than_some_rank_must(seed: int) -> None:
    # Some rank has to send `asked / holders` for the holders asked most, and some rank to receive the most.
    rng = random.Random(seed)
    state_map = uniform_state_map(12, 0)
    world_size = rng.choice([8, 12, 16, 24])
    source, target = (random_layout(rng, world_size, 12) for _ in range(2))
    plans = all_plans(state_map, source, target)
    held = [held_elements(state_map, source, rank) for rank in range(world_size)]
    holders: dict[int, list[int]] = {}
    for rank in range(world_size):
        for element in held[rank]:
            holders.setdefault(element, []).append(rank)
    asked: dict[tuple[int, ...], int] = {}
    for rank in range(world_size):
        for element in held_elements(state_map, target, rank) - held[rank]:
            key = tuple(holders[element])
            asked[key] = asked.get(key, 0) + 1
    must_send = max((count / len(key) for key, count in asked.items()), default=0)
    must_receive = max(p.received_elements for p in plans)
    assert max(p.sent_elements for p in plans) <= 1.25 * max(must_send, must_receive)


def test_share_out_prefers_the_node_then_the_least_loaded() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ranks = range(rng.randint(2, 40))
        holders = sorted(rng.sample(ranks, rng.randint(1, len(ranks))))
        takers = sorted(rank for rank in ranks if rank not in holders and rng.random() < 0.7)
        ranks_per_node = rng.choice([1, 2, 4, 8, 64])
        pairs = share_out(holders, takers, ranks_per_node, first=rng.randrange(len(holders)))
        assert sorted(taker for _, taker in pairs) == takers
        nodes = {holder // ranks_per_node for holder in holders}
        load = dict.fromkeys(holders, 0)
        for giver, taker in pairs:
            load[giver] += 1
            if taker // ranks_per_node in nodes:
                assert giver // ranks_per_node == taker // ranks_per_node
        if len(nodes) == 1 or ranks_per_node == 64:
            assert max(load.values()) - min(load.values()) <= 1


def test_merge_joins_what_is_one_rectangle_and_nothing_else() -> None:
    def move(rows: tuple[int, int], columns: tuple[int, int], tensor: int = 0) -> Move:
        offset = rows[0] * 10 + columns[0]
        view = View(piece=0, offset=offset, stride=10, position=offset)
        return Move(tensor, rows, columns, view, view)

    assert merge([move((0, 1), (0, 3)), move((0, 1), (3, 7))]) == [move((0, 1), (0, 7))]
    assert merge([move((0, 1), (2, 5)), move((1, 4), (2, 5))]) == [move((0, 4), (2, 5))]
    apart = [move((0, 1), (0, 3)), move((0, 1), (4, 7)), move((1, 2), (0, 7)), move((2, 3), (0, 7), tensor=1)]
    assert merge(apart) == apart
    # Joined columns make a row that joins the row above.
    assert merge([move((0, 1), (0, 4)), move((1, 2), (0, 2)), move((1, 2), (2, 4))]) == [move((0, 2), (0, 4))]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_plan", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_70b_parts_agree_between_peers_of_1024_ranks(benchmark: ModuleType) -> None:
    for zero_stage in (0, 1):
        state_map = benchmark.llama_70b(zero_stage)
        assert len(state_map.tensors) == 723
        assert sum(tensor.numel for tensor in state_map.tensors) == 70_553_706_496
        source, target = Layout(16, 8, 8), Layout(64, 4, 4)
        for rank in (0, 517, 1023):
            mine = plan(state_map, source, target, rank, 8)
            assert mine.received_elements == missing_elements(state_map, source, target, rank)
            for peer, moves in mine.receives.items():
                assert plan(state_map, source, target, peer, 8).sends[rank] == moves
            for peer, moves in mine.sends.items():
                assert plan(state_map, source, target, peer, 8).receives[rank] == moves


def test_benchmark_writes_its_figures(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    command = [sys.executable, str(BENCHMARK), "--ranks", "517", "--output", str(output)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    figures = json.loads(output.read_text())
    assert figures["seconds"] > 0 and 0 < figures["megabytes"] < 200
    assert figures["seconds"] == max(case["seconds"] for case in figures["cases"])
    assert "dp16-tp8-pp8" in printed
