"""Which piece of which tensor a rank holds, against numbered elements that numpy cuts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from copus_lightning.core.layout import Layout, enumerate_layouts
from copus_lightning.engine.state import (
    LogicalTensor,
    Placement,
    StateMap,
    even_bounds,
    even_index,
    rectangles,
)


def random_state_map(rng: random.Random, zero_stage: int) -> StateMap:
    """A small decoder with uneven widths, tied or untied ends, replicated tensors and up to three groups."""
    n_layers, hidden = rng.randint(2, 7), rng.choice([4, 6, 8])
    vocab, intermediate = rng.choice([257, 31, 24]), rng.choice([3, 11, 13, 16])
    tied = rng.random() < 0.5
    groups = rng.randint(1, 3)
    tensors = [
        LogicalTensor(
            "embed", (vocab, hidden), rng.choice([0, 1, None]), None, True, tied, rng.randrange(groups)
        )
    ]
    for layer in range(n_layers):
        cuts: list[tuple[str, tuple[int, ...], int | None]] = [
            ("norm", (hidden,), None),
            ("q", (hidden, hidden), 0),
            ("q.bias", (hidden,), 0),
            ("o", (hidden, hidden), 1),
            ("o.bias", (hidden,), None),
            ("up", (intermediate, hidden), 0),
            ("down", (hidden, intermediate), 1),
            ("experts", (2, intermediate, 3), rng.choice([0, 1, 2])),
            ("gain", (), None),
        ]
        for name, shape, dim in cuts:
            tensors.append(LogicalTensor(f"{layer}.{name}", shape, dim, layer, group=rng.randrange(groups)))
    tensors.append(LogicalTensor("final_norm", (hidden,), None, None, False, True))
    if not tied:
        tensors.append(LogicalTensor("head", (vocab, hidden), 0, None, False, True, rng.randrange(groups)))
    return StateMap(tuple(tensors), n_layers, zero_stage, alignment=rng.choice([1, 2, 4]))


def random_layout(rng: random.Random, world_size: int, n_layers: int) -> Layout:
    return rng.choice([layout for layout in enumerate_layouts(world_size) if layout.pipeline <= n_layers])


def flat_groups(state_map: StateMap, layout: Layout, rank: int) -> dict[int, np.ndarray]:
    """By group, the numbers of the elements in a rank's flat group or partition, -1 for padding.

    Shares no code with the package but the order of ranks: element i of tensor k is numbered i plus the
    elements of all tensors before k.
    """
    place = layout.coordinates(rank)
    mine = np.array_split(np.arange(state_map.n_layers), layout.pipeline)[place.pipeline]
    flat: dict[int, list[np.ndarray]] = {}
    first = 0
    for tensor in state_map.tensors:
        whole = np.arange(first, first + int(np.prod(tensor.shape))).reshape(tensor.shape)
        first += whole.size
        here = (
            tensor.layer in mine
            if tensor.layer is not None
            else (tensor.on_first and place.pipeline == 0)
            or (tensor.on_last and place.pipeline == layout.pipeline - 1)
        )
        if here:
            shard = whole
            if tensor.shard_dim is not None:
                shard = np.array_split(whole, layout.tensor, axis=tensor.shard_dim)[place.tensor]
            flat.setdefault(tensor.group, []).append(shard.reshape(-1))
    groups = {group: np.concatenate(shards) for group, shards in flat.items()}
    if state_map.zero_stage == 1:
        for group, elements in groups.items():
            padding = -len(elements) % (state_map.alignment * layout.data)
            padded = np.concatenate([elements, np.full(padding, -1, dtype=elements.dtype)])
            groups[group] = np.split(padded, layout.data)[place.data]
    return groups


def tensor_of_element(state_map: StateMap, element: int) -> int:
    for index, tensor in enumerate(state_map.tensors):
        element -= tensor.numel
        if element < 0:
            return index
    raise AssertionError("no such element")


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_what_numpy_cuts(seed: int) -> None:
    rng = random.Random(seed)
    state_map = random_state_map(rng, zero_stage=seed % 2)
    layout = random_layout(rng, rng.choice([1, 2, 3, 4, 6, 8]), state_map.n_layers)
    for rank in range(layout.world_size):
        expected = flat_groups(state_map, layout, rank)
        pieces = state_map.pieces(layout, rank)
        assert [piece.tensor for piece in pieces] == sorted({piece.tensor for piece in pieces})
        assert sum(piece.numel for piece in pieces) == sum((e >= 0).sum() for e in expected.values())
        first = np.cumsum([0] + [tensor.numel for tensor in state_map.tensors])
        for piece in pieces:
            tensor = state_map.tensors[piece.tensor]
            assert piece.numel > 0
            assert piece.group == tensor.group
            shard = np.arange(tensor.numel).reshape(tensor.shape) + first[piece.tensor]
            if tensor.shard_dim is not None:
                bounds = state_map.shard_bounds(piece.tensor, layout, layout.coordinates(rank).tensor)
                shard = shard.take(range(*bounds), axis=tensor.shard_dim)
            held = shard.reshape(-1)[piece.flat_start : piece.flat_stop]
            assert shard.shape == tensor.shard_shape(layout.tensor, layout.coordinates(rank).tensor)
            stop = piece.group_offset + piece.numel
            assert np.array_equal(held, expected[piece.group][piece.group_offset : stop])
        for group, elements in expected.items():
            assert state_map.partition_numel(layout, rank, group) == len(elements)


@pytest.mark.parametrize("seed", range(10))
def test_piece_index_agrees_with_the_list(seed: int) -> None:
    rng = random.Random(seed)
    state_map = random_state_map(rng, zero_stage=seed % 2)
    layout = random_layout(rng, 8, state_map.n_layers)
    placement = Placement(state_map, layout)
    for rank in range(8):
        place = layout.coordinates(rank)
        where = place.pipeline, place.tensor, place.data
        for index, piece in enumerate(state_map.pieces(layout, rank)):
            assert placement.piece_index(piece.tensor, *where) == index


@pytest.mark.parametrize("seed", range(10))
def test_local_tensors_are_the_parameters_of_the_stage(seed: int) -> None:
    rng = random.Random(seed)
    state_map = random_state_map(rng, zero_stage=0)
    layout = random_layout(rng, 6, state_map.n_layers)
    for rank in range(6):
        elements = np.concatenate(list(flat_groups(state_map, layout, rank).values()))
        held = {tensor_of_element(state_map, int(element)) for element in elements}
        # A rank may own a parameter of which its shard is empty.
        local = state_map.local_tensors(layout, rank)
        assert held <= set(local)
        for index in set(local) - held:
            assert 0 in state_map.tensors[index].shard_shape(layout.tensor, layout.coordinates(rank).tensor)


def test_tied_weight_lives_on_both_ends_and_once_without_a_pipeline() -> None:
    tied = LogicalTensor("embed", (257, 4), 0, None, on_first=True, on_last=True)
    state_map = StateMap((tied, LogicalTensor("w", (4, 4), 0, 0), LogicalTensor("v", (4, 4), 0, 1)), 2, 0)
    assert state_map.stages(0, Layout(1, 1, 2)) == (0, 1)
    assert state_map.stages(0, Layout(2, 1, 1)) == (0,)
    assert state_map.local_tensors(Layout(1, 1, 2), 1) == [0, 2]


def test_uneven_vocabulary_gives_extras_to_the_first_ranks() -> None:
    state_map = StateMap((LogicalTensor("embed", (257, 4), 0, None, True),), 1, 0)
    layout = Layout(1, 4, 1)
    assert [state_map.shard_bounds(0, layout, rank) for rank in range(4)] == [
        (0, 65),
        (65, 129),
        (129, 193),
        (193, 257),
    ]


def test_extra_layers_go_to_the_first_stages() -> None:
    state_map = StateMap((), 7, 0)
    assert [state_map.layer_range(Layout(1, 1, 3), stage) for stage in range(3)] == [(0, 3), (3, 5), (5, 7)]


def test_even_index_inverts_even_bounds() -> None:
    for size in range(1, 20):
        for parts in range(1, 20):
            for part in range(parts):
                for position in range(*even_bounds(size, parts, part)):
                    assert even_index(size, parts, position) == part


def test_rectangles_cover_a_range_once_in_order() -> None:
    for width in range(1, 6):
        for start in range(13):
            for stop in range(start, 14):
                parts = rectangles(start, stop, width)
                flat = [
                    row * width + column
                    for top, bottom, left, right in parts
                    for row in range(top, bottom)
                    for column in range(left, right)
                ]
                assert len(parts) <= 3
                assert flat == list(range(start, stop))


def test_a_tensor_belongs_to_a_layer_or_an_end() -> None:
    with pytest.raises(AssertionError, match="layer or an end"):
        LogicalTensor("lost", (4,))
    with pytest.raises(AssertionError, match="layer or an end"):
        LogicalTensor("both", (4,), layer=0, on_first=True)
