"""A rank's pieces as boxes of the whole tensors: how a checkpoint comes to know no layout. Pure geometry.

Each box is a run of elements both in the rank's flat storage and in the whole tensor's coordinates, so it is
written and read without any index arithmetic in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from copus_lightning.core.layout import Layout
from copus_lightning.engine.state import Piece, StateMap, even_bounds


@dataclass(frozen=True)
class Box:
    """Part of a tensor, an n-dimensional interval.

    Attributes:
        tensor: Index of the logical tensor.
        piece: Index among the rank's pieces.
        start: First element in the piece's flat storage; the others follow row-major.
        offsets: Lowest coordinates in the whole tensor.
        sizes: Elements along each dimension.
    """

    tensor: int
    piece: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stop(self) -> int:
        """End of its elements in the piece's flat storage, exclusive."""
        return self.start + prod(self.sizes)


def needed_boxes(state_map: StateMap, layout: Layout, rank: int) -> list[Box]:
    """All that a rank holds, which it reads from a checkpoint."""
    ranges = [
        (index, piece, piece.flat_start, piece.flat_stop)
        for index, piece in enumerate(state_map.pieces(layout, rank))
    ]
    return _boxes(state_map, layout, rank, ranges)


def saved_boxes(state_map: StateMap, layout: Layout, rank: int) -> list[Box]:
    """What a rank writes, such that over all ranks every element is written once.

    Of what several ranks hold, tensor rank 0 writes a tensor that is not cut, the first stage a tied weight, and
    with ZeRO-0 each data rank an equal part.
    """
    at = layout.coordinates(rank)
    own: list[tuple[int, Piece]] = []
    for index, piece in enumerate(state_map.pieces(layout, rank)):
        whole = state_map.tensors[piece.tensor].shard_dim is None
        if (at.tensor == 0 or not whole) and state_map.stages(piece.tensor, layout)[0] == at.pipeline:
            own.append((index, piece))
    low, high = 0, sum(piece.numel for _, piece in own)
    if state_map.zero_stage == 0:
        low, high = even_bounds(high, layout.data, at.data)
    ranges = []
    position = 0
    for index, piece in own:
        start = piece.flat_start + min(max(low - position, 0), piece.numel)
        stop = piece.flat_start + min(max(high - position, 0), piece.numel)
        ranges.append((index, piece, start, stop))
        position += piece.numel
    return _boxes(state_map, layout, rank, ranges)


def _boxes(
    state_map: StateMap, layout: Layout, rank: int, ranges: list[tuple[int, Piece, int, int]]
) -> list[Box]:
    tensor_rank = layout.coordinates(rank).tensor
    found = []
    for index, piece, start, stop in ranges:
        tensor = state_map.tensors[piece.tensor]
        low = 0
        if tensor.shard_dim is not None:
            low, _ = tensor.shard_bounds(layout.tensor, tensor_rank)
        for flat, offsets, sizes in intervals(start, stop, tensor.shard_shape(layout.tensor, tensor_rank)):
            moved = tuple(o + low if d == tensor.shard_dim else o for d, o in enumerate(offsets))
            found.append(Box(piece.tensor, index, flat - piece.flat_start, moved, sizes))
    return found


def intervals(
    start: int, stop: int, shape: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cuts elements [start, stop) of a row-major tensor into at most 2n - 1 n-dimensional intervals, in order.

    Returns:
        First element, offsets and sizes of each.
    """
    if start >= stop:
        return []
    if not shape:
        return [(0, (), ())]
    width = prod(shape[1:])
    first, skipped = divmod(start, width)
    last, taken = divmod(stop, width)

    def of_row(row: int, low: int, high: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        inner = intervals(low, high, shape[1:])
        return [(row * width + flat, (row, *offsets), (1, *sizes)) for flat, offsets, sizes in inner]

    if first == last:
        return of_row(first, skipped, taken)
    parts = []
    if skipped:
        parts += of_row(first, skipped, width)
        first += 1
    if first < last:
        parts.append((first * width, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if taken:
        parts += of_row(last, 0, taken)
    return parts
