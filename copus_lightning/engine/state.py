"""Which piece of which logical tensor each rank holds, per layout: pure geometry, no process group, no torch.

| word          | meaning                                                                               |
|---------------|---------------------------------------------------------------------------------------|
| logical tensor| a parameter of the whole model, as if one process held it                             |
| matrix view   | the logical tensor seen as (rows, columns), cut along columns only                    |
| shard         | the columns that one tensor rank holds, stored row-major                              |
| group         | the shards of one optimizer param group on one rank, laid end to end                  |
| partition     | with ZeRO-1, the equal share of a group that one data rank keeps masters and moments of|
| piece         | what a rank holds of one tensor: a range of its flattened shard                       |

A tensor of shape (d0, .., dn) cut along dimension s is viewed as (d0*..*d(s-1), ds*..*dn), so a shard is
always a range of columns; a tensor that is whole on every tensor rank, or cut along dimension 0, has one row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import prod

from copus_lightning.core.layout import Layout

Rectangle = tuple[int, int, int, int]
"""Rows [0] to [1] (exclusive) and columns [2] to [3] (exclusive) of a matrix."""


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter of the whole model and the rule that places it.

    Args:
        name: Name in the whole model.
        shape: Sizes of the whole tensor.
        shard_dim: Dimension cut over tensor ranks; None where each tensor rank has all of it.
        layer: Decoder layer that owns it; None for what belongs to an end of the model.
        on_first: Held by the first stage (embedding). Only with `layer=None`.
        on_last: Held by the last stage (final norm, head). A tied weight has both, and two copies.
        group: Index of the optimizer's param group.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    layer: int | None = None
    on_first: bool = False
    on_last: bool = False
    group: int = 0

    def __post_init__(self) -> None:
        assert (self.layer is None) == (self.on_first or self.on_last), (
            f"{self.name}: a layer or an end, not both"
        )
        assert self.shard_dim is None or 0 <= self.shard_dim < len(self.shape), (
            f"{self.name}: no such dimension"
        )

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix view."""
        rows = prod(self.shape[: self.shard_dim or 0])
        return rows, prod(self.shape[self.shard_dim or 0 :])

    def shard_bounds(self, tensor_size: int, tensor_rank: int) -> tuple[int, int]:
        """Range along `shard_dim` on one of `tensor_size` ranks: as even as possible, extras to the first.

        These are the sizes of `torch.tensor_split`, and of DeepSpeed's uneven layers.
        """
        assert self.shard_dim is not None, f"{self.name} is whole on every tensor rank"
        return even_bounds(self.shape[self.shard_dim], tensor_size, tensor_rank)

    def shard_columns(self, tensor_size: int, tensor_rank: int) -> tuple[int, int]:
        """Range of columns of the matrix view on one of `tensor_size` ranks."""
        if self.shard_dim is None:
            return 0, self.numel
        low, high = self.shard_bounds(tensor_size, tensor_rank)
        inner = prod(self.shape[self.shard_dim + 1 :])
        return low * inner, high * inner

    def shard_shape(self, tensor_size: int, tensor_rank: int) -> tuple[int, ...]:
        """Shape of the tensor on one of `tensor_size` ranks."""
        if self.shard_dim is None:
            return self.shape
        low, high = self.shard_bounds(tensor_size, tensor_rank)
        return (*self.shape[: self.shard_dim], high - low, *self.shape[self.shard_dim + 1 :])


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor; a rank has at most one piece of a tensor, and none that is empty.

    Args:
        tensor: Index of the logical tensor.
        flat_start: First element, in the rank's shard flattened row-major.
        flat_stop: End of the range, exclusive.
        group: Index of the optimizer's param group.
        group_offset: Place of the first element in the rank's flat group (ZeRO-0) or partition (ZeRO-1).
    """

    tensor: int
    flat_start: int
    flat_stop: int
    group: int
    group_offset: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.flat_stop - self.flat_start


@dataclass(frozen=True)
class StateMap:
    """Where the optimizer state of a model lives, for any layout.

    Args:
        tensors: Every parameter, in the order in which each rank's optimizer sees those that it holds.
        n_layers: Decoder layers.
        zero_stage: 0, each data rank holds all of its shards' state; 1, each a partition of it.
        alignment: With ZeRO-1 a group is padded to a multiple of `alignment` x data size elements;
            2 is the factor of DeepSpeed's `BF16_Optimizer`.
    """

    tensors: tuple[LogicalTensor, ...]
    n_layers: int
    zero_stage: int
    alignment: int = 2

    def __post_init__(self) -> None:
        assert self.zero_stage in (0, 1), f"zero_stage must be 0 or 1, got {self.zero_stage}"
        assert self.alignment >= 1
        for tensor in self.tensors:
            assert tensor.layer is None or 0 <= tensor.layer < self.n_layers, f"{tensor.name}: no such layer"

    def layer_range(self, layout: Layout, pipeline: int) -> tuple[int, int]:
        """Layers [start, stop) of one stage: as even as possible, extras to the first stages.

        The last stage has the head to compute already, so it is never among the longer ones.
        """
        return even_bounds(self.n_layers, layout.pipeline, pipeline)

    def stages(self, tensor: int, layout: Layout) -> tuple[int, ...]:
        """Stages that hold a tensor, ascending: two for a tied weight, else one."""
        place = self.tensors[tensor]
        if place.layer is not None:
            return (even_index(self.n_layers, layout.pipeline, place.layer),)
        last = layout.pipeline - 1
        return tuple(sorted(({0} if place.on_first else set()) | ({last} if place.on_last else set())))

    def shard_bounds(self, tensor: int, layout: Layout, tensor_rank: int) -> tuple[int, int]:
        """Range of a cut tensor along its `shard_dim` on one tensor rank."""
        return self.tensors[tensor].shard_bounds(layout.tensor, tensor_rank)

    def local_tensors(self, layout: Layout, rank: int) -> list[int]:
        """Tensors of which a rank has a shard, ascending: the parameters of its stage."""
        stage = layout.coordinates(rank).pipeline
        return [index for index in range(len(self.tensors)) if stage in self.stages(index, layout)]

    def pieces(self, layout: Layout, rank: int) -> list[Piece]:
        """What a rank holds masters and moments of, ascending by tensor."""
        place = layout.coordinates(rank)
        return Placement(self, layout).pieces(place.pipeline, place.tensor, place.data)

    def partition_numel(self, layout: Layout, rank: int, group: int) -> int:
        """Elements of a rank's flat group (ZeRO-0) or of its partition with padding (ZeRO-1)."""
        place = layout.coordinates(rank)
        flat = Placement(self, layout).groups(place.pipeline, place.tensor).get(group)
        return flat.partition_numel if flat else 0


class _FlatGroup:
    """The shards of one param group on one (stage, tensor rank), end to end; empty shards left out."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.starts: list[int] = []
        self.numel = 0
        self.partition_numel = 0

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Positions [low, high) in `tensors` of those with an element in [start, stop)."""
        stop = min(stop, self.numel)
        if start >= stop:
            return 0, 0
        return bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)


class Placement:
    """A `StateMap` under one layout, with the offsets it has worked out kept for the next question.

    Only the (stage, tensor rank) pairs asked for are worked out, so a question about one rank of a thousand
    stays cheap.
    """

    def __init__(self, state_map: StateMap, layout: Layout) -> None:
        self.state_map = state_map
        self.layout = layout
        self._by_stage: list[list[int]] = [[] for _ in range(layout.pipeline)]
        self._stages: list[tuple[int, ...]] = []
        for index in range(len(state_map.tensors)):
            self._stages.append(state_map.stages(index, layout))
            for stage in self._stages[index]:
                self._by_stage[stage].append(index)
        self._groups: dict[tuple[int, int], dict[int, _FlatGroup]] = {}
        self._starts: dict[tuple[int, int], dict[int, int]] = {}

    def stages(self, tensor: int) -> tuple[int, ...]:
        """Stages that hold a tensor, ascending."""
        return self._stages[tensor]

    def columns(self, tensor: int, tensor_rank: int) -> tuple[int, int]:
        """Columns of the matrix view that one tensor rank holds."""
        return self.state_map.tensors[tensor].shard_columns(self.layout.tensor, tensor_rank)

    def groups(self, stage: int, tensor_rank: int) -> dict[int, _FlatGroup]:
        """The flat param groups of one (stage, tensor rank), by group index."""
        key = (stage, tensor_rank)
        if key not in self._groups:
            groups: dict[int, _FlatGroup] = {}
            starts: dict[int, int] = {}
            for index in self._by_stage[stage]:
                tensor = self.state_map.tensors[index]
                low, high = self.columns(index, tensor_rank)
                numel = tensor.matrix_shape[0] * (high - low)
                flat = groups.setdefault(tensor.group, _FlatGroup())
                starts[index] = flat.numel
                if numel:
                    flat.tensors.append(index)
                    flat.starts.append(flat.numel)
                    flat.numel += numel
            for flat in groups.values():
                flat.partition_numel = flat.numel
                if self.state_map.zero_stage == 1:
                    unit = self.state_map.alignment * self.layout.data
                    flat.partition_numel = -(-flat.numel // unit) * self.state_map.alignment
            self._groups[key] = groups
            self._starts[key] = starts
        return self._groups[key]

    def group_start(self, tensor: int, stage: int, tensor_rank: int) -> int:
        """Place of a shard's first element in its flat group."""
        self.groups(stage, tensor_rank)
        return self._starts[stage, tensor_rank][tensor]

    def piece(self, tensor: int, stage: int, tensor_rank: int, data_rank: int) -> Piece:
        """What a rank holds of a tensor of its stage; here it may be empty."""
        low, high = self.columns(tensor, tensor_rank)
        logical = self.state_map.tensors[tensor]
        numel = logical.matrix_shape[0] * (high - low)
        start = self.group_start(tensor, stage, tensor_rank)
        if self.state_map.zero_stage == 0:
            return Piece(tensor, 0, numel, logical.group, start)
        size = self.groups(stage, tensor_rank)[logical.group].partition_numel
        first = min(max(data_rank * size - start, 0), numel)
        last = min(max((data_rank + 1) * size - start, first), numel)
        return Piece(tensor, first, last, logical.group, start + first - data_rank * size)

    def rectangles(self, tensor: int, stage: int, tensor_rank: int, data_rank: int) -> list[Rectangle]:
        """A rank's piece as at most three rectangles of the tensor's matrix view."""
        low, high = self.columns(tensor, tensor_rank)
        piece = self.piece(tensor, stage, tensor_rank, data_rank)
        parts = rectangles(piece.flat_start, piece.flat_stop, high - low)
        return [(top, bottom, left + low, right + low) for top, bottom, left, right in parts]

    def held(self, stage: int, tensor_rank: int, data_rank: int) -> list[int]:
        """Tensors of which a rank has a piece, ascending."""
        held: list[int] = []
        for flat in self.groups(stage, tensor_rank).values():
            held += flat.tensors[slice(*self._span(flat, data_rank))]
        return sorted(held)

    def pieces(self, stage: int, tensor_rank: int, data_rank: int) -> list[Piece]:
        """The pieces of a rank, ascending by tensor."""
        return [
            self.piece(index, stage, tensor_rank, data_rank)
            for index in self.held(stage, tensor_rank, data_rank)
        ]

    def piece_index(self, tensor: int, stage: int, tensor_rank: int, data_rank: int) -> int:
        """Place of a tensor's piece in `pieces`, without making the list."""
        index = 0
        for flat in self.groups(stage, tensor_rank).values():
            low, high = self._span(flat, data_rank)
            index += bisect_left(flat.tensors, tensor, low, high) - low
        return index

    def _span(self, flat: _FlatGroup, data_rank: int) -> tuple[int, int]:
        if self.state_map.zero_stage == 0:
            return 0, len(flat.tensors)
        return flat.span(data_rank * flat.partition_numel, (data_rank + 1) * flat.partition_numel)


def even_bounds(size: int, parts: int, part: int) -> tuple[int, int]:
    """Range [start, stop) of one of `parts` as-even-as-possible parts, extras to the first ones."""
    base, extra = divmod(size, parts)
    start = part * base + min(part, extra)
    return start, start + base + (part < extra)


def even_index(size: int, parts: int, position: int) -> int:
    """The part of `even_bounds` that `position` falls in."""
    base, extra = divmod(size, parts)
    if position < extra * (base + 1):
        return position // (base + 1)
    return extra + (position - extra * (base + 1)) // base


def rectangles(start: int, stop: int, width: int) -> list[Rectangle]:
    """Cut elements [start, stop) of a row-major matrix of `width` columns into at most three rectangles.

    They are the end of a first row, whole rows, and the beginning of a last row, in this order.
    """
    if start >= stop:
        return []
    first, skipped = divmod(start, width)
    last, taken = divmod(stop, width)
    if first == last:
        return [(first, last + 1, skipped, taken)]
    parts: list[Rectangle] = []
    if skipped:
        parts.append((first, first + 1, skipped, width))
        first += 1
    if first < last:
        parts.append((first, last, 0, width))
    if taken:
        parts.append((last, last + 1, 0, taken))
    return parts
