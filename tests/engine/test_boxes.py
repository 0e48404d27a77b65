"""Boxes of a checkpoint: together they are every element, once, whatever the layout."""

from __future__ import annotations

import random

import numpy as np
import pytest

from copus_lightning.core.layout import Layout
from copus_lightning.engine.boxes import Box, intervals, needed_boxes, saved_boxes
from copus_lightning.engine.state import LogicalTensor, StateMap

LAYOUTS = [
    Layout(),
    Layout(data=4),
    Layout(tensor=3),
    Layout(pipeline=3),
    Layout(2, 2, 2),
    Layout(3, 1, 2),
    Layout(5, 2, 1),
]


def random_map(seed: int, zero_stage: int) -> StateMap:
    draw = random.Random(seed)
    tensors = [
        LogicalTensor("embedding", (7, 4), 0, on_first=True, on_last=True, group=1),
        LogicalTensor("norm", (draw.randint(1, 5),), on_last=True),
        LogicalTensor("scalar", (), layer=0),
    ]
    for layer in range(3):
        for name in "abc":
            shape = tuple(draw.randint(3, 6) for _ in range(draw.randint(1, 4)))
            shard_dim = draw.choice([None, *range(len(shape))])
            tensors.append(
                LogicalTensor(f"{layer}.{name}", shape, shard_dim, layer, group=draw.randint(0, 1))
            )
    return StateMap(tuple(tensors), 3, zero_stage)


def place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_written_once_and_needed_where_it_is_held(
    seed: int, layout: Layout, zero_stage: int
) -> None:
    state_map = random_map(seed, zero_stage)
    whole = [np.arange(t.numel).reshape(t.shape) for t in state_map.tensors]
    counts = [np.zeros(t.shape, dtype=int) for t in state_map.tensors]
    sizes = []
    for rank in range(layout.world_size):
        pieces = state_map.pieces(layout, rank)
        tensor_rank = layout.coordinates(rank).tensor
        storages = []
        for piece in pieces:
            tensor = state_map.tensors[piece.tensor]
            shard = whole[piece.tensor]
            if tensor.shard_dim is not None:
                low, high = tensor.shard_bounds(layout.tensor, tensor_rank)
                shard = shard.take(range(low, high), axis=tensor.shard_dim)
            storages.append(shard.reshape(-1)[piece.flat_start : piece.flat_stop])

        needed = needed_boxes(state_map, layout, rank)
        saved = saved_boxes(state_map, layout, rank)
        for box in needed + saved:
            found = storages[box.piece][box.start : box.stop].reshape(box.sizes)
            np.testing.assert_array_equal(found, whole[box.tensor][place(box)])
        for index, piece in enumerate(pieces):
            covered = [e for b in needed if b.piece == index for e in range(b.start, b.stop)]
            assert covered == list(range(piece.numel))
        for box in saved:
            counts[box.tensor][place(box)] += 1
        sizes.append(sum(box.stop - box.start for box in saved))
    assert all((count == 1).all() for count in counts)
    if zero_stage == 0 and layout.tensor == layout.pipeline == 1:
        assert max(sizes) - min(sizes) <= 1, "data ranks share the writing evenly"


def test_a_range_has_at_most_2n_minus_1_intervals() -> None:
    shape = (3, 4, 5)
    numbers = np.arange(60).reshape(shape)
    for start in range(61):
        for stop in range(start, 61):
            parts = intervals(start, stop, shape)
            assert len(parts) <= 5
            found = [
                numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
                for _, offsets, sizes in parts
            ]
            assert [int(f[0]) for f in found] == [flat for flat, _, _ in parts]
            assert [int(i) for f in found for i in f] == list(range(start, stop))
