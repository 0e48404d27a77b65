"""From one layout's pieces to another's: which elements every rank keeps, sends and receives.

The plan is a pure function of a `StateMap` and two layouts. Each rank works out its own part without talking
to anyone, and the parts agree: `plan(a).sends[b] == plan(b).receives[a]`.

How: the cuts that either layout makes in a tensor divide it into *atoms*, rectangles whose elements all have
the same holders (before) and the same needers (after). A rank walks over the atoms in its own old and new
pieces alone. For each atom, a needer that holds it keeps it; every other needer is given one holder by a rule
of nothing but the sorted holders, needers and nodes, so that all who share an atom come to the same answer.
Each element thus travels once to each rank that needs and does not hold it: the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from copus_lightning.core.layout import Layout
from copus_lightning.engine.sources import first_asked, share_out
from copus_lightning.engine.state import Placement, Rectangle, StateMap


class View(NamedTuple):
    """Where a rectangle lies in a rank's piece, for `torch.as_strided`.

    Args:
        piece: Index in `StateMap.pieces(layout, rank)` of the rank on this side.
        offset: First element, counted from the start of the piece's flat storage.
        stride: Elements from one row to the next; within a row they are adjacent.
        position: First element, counted from the start of the rank's flat group or partition.
    """

    piece: int
    offset: int
    stride: int
    position: int


class Move(NamedTuple):
    """A rectangle of a logical tensor that goes from a source piece to a target piece.

    On either side `torch.as_strided(flat_piece, move.shape, (view.stride, 1), view.offset)` is the rectangle.

    Args:
        tensor: Index of the logical tensor.
        rows: Range of rows of its matrix view, stop exclusive.
        columns: Range of columns of its matrix view, stop exclusive.
        source: The rectangle in the sending rank's piece under the source layout.
        target: The rectangle in the receiving rank's piece under the target layout.
    """

    tensor: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    source: View
    target: View

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in elements."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def numel(self) -> int:
        """Elements that move."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass
class ExchangePlan:
    """One rank's part of an exchange; moves with one peer stand in the same order on both ends.

    Args:
        rank: The rank whose part this is.
        keeps: What it needs and holds already: copied from its own old pieces to its new ones.
        sends: By receiving rank, ascending, what it sends.
        receives: By sending rank, ascending, what it receives.
    """

    rank: int
    keeps: list[Move] = field(default_factory=list)
    sends: dict[int, list[Move]] = field(default_factory=dict)
    receives: dict[int, list[Move]] = field(default_factory=dict)

    @property
    def kept_elements(self) -> int:
        """Elements kept, of one state (a master or a moment)."""
        return sum(move.numel for move in self.keeps)

    @property
    def sent_elements(self) -> int:
        """Elements sent, of one state."""
        return sum(move.numel for moves in self.sends.values() for move in moves)

    @property
    def received_elements(self) -> int:
        """Elements received, of one state: what this rank needs and does not hold."""
        return sum(move.numel for moves in self.receives.values() for move in moves)


class _Cell(NamedTuple):
    """The ranks of one data-parallel family that have the same piece: one of them, or all with ZeRO-0."""

    stage: int
    tensor_rank: int
    data_rank: int | None


_Cells = tuple[tuple[_Cell, ...], tuple[_Cell, ...]]
_Atom = tuple[Rectangle, tuple[_Cell, ...], tuple[_Cell, ...]]


def plan(
    state_map: StateMap, source: Layout, target: Layout, rank: int, ranks_per_node: int | None = None
) -> ExchangePlan:
    """What one rank keeps, sends and receives when the layout changes from `source` to `target`.

    Args:
        state_map: The tensors; both layouts have its ZeRO stage.
        source: Layout that the pieces are in.
        target: Layout that they are needed in, of as many ranks.
        rank: The rank to plan for.
        ranks_per_node: Ranks r with equal r // ranks_per_node share a node, and are preferred as sources
            for one another. None: all ranks are equally near.
    """
    return _Planner(state_map, source, target, rank, ranks_per_node).plan()


def missing_elements(state_map: StateMap, source: Layout, target: Layout, rank: int) -> int:
    """Elements of one state (a master or a moment) that a rank needs under `target` and lacks under `source`.

    Their sum over ranks is the lower bound of what any exchange can move. It is worked out from the rank's
    own pieces, not from a plan.
    """
    missing = 0
    old, new = Placement(state_map, source), Placement(state_map, target)
    old_place, new_place = _place(source, rank), _place(target, rank)
    held = set(old.held(*old_place))
    for tensor in new.held(*new_place):
        missing += new.piece(tensor, *new_place).numel
        if tensor in held:
            for mine in old.rectangles(tensor, *old_place):
                for wanted in new.rectangles(tensor, *new_place):
                    top, bottom, left, right = _intersection(mine, wanted)
                    missing -= max(bottom - top, 0) * max(right - left, 0)
    return missing


class _Planner:
    def __init__(
        self, state_map: StateMap, source: Layout, target: Layout, rank: int, ranks_per_node: int | None
    ) -> None:
        assert source.world_size == target.world_size, f"{source} and {target} differ in ranks"
        assert 0 <= rank < source.world_size, f"rank {rank} is outside {source}"
        assert ranks_per_node is None or ranks_per_node >= 1
        self.state_map = state_map
        self.source = Placement(state_map, source)
        self.target = Placement(state_map, target)
        self.rank = rank
        self.ranks_per_node = ranks_per_node or source.world_size
        # Layers repeat, and with them the questions: answers are kept, by cells where they are the same.
        self._cell_ranks: dict[tuple[bool, tuple[_Cell, ...]], list[int]] = {}
        self._takers: dict[_Cells, list[int]] = {}
        self._given: dict[tuple[_Cells, int], tuple[int | None, list[int]]] = {}
        # Index of a piece, columns and elements left out before its first one, width of a row, place in its group.
        self._storages: dict[tuple[bool, int, int, int, int], tuple[int, int, int, int]] = {}

    def plan(self) -> ExchangePlan:
        result = ExchangePlan(self.rank)
        own = [(side, _place(side.layout, self.rank)) for side in (self.source, self.target)]
        held = [set(side.held(*place)) for side, place in own]
        turns = _turns(self.state_map)
        for tensor in sorted(held[0] | held[1]):
            atoms: dict[Rectangle, _Atom] = {}
            for (side, place), tensors in zip(own, held, strict=True):
                for region in side.rectangles(tensor, *place) if tensor in tensors else ():
                    atoms.update((atom[0], atom) for atom in self._atoms(tensor, region))
            for rectangle in sorted(atoms):
                self._route(result, tensor, atoms[rectangle], turns[tensor])
        return ExchangePlan(
            self.rank,
            merge(result.keeps),
            {peer: merge(result.sends[peer]) for peer in sorted(result.sends)},
            {peer: merge(result.receives[peer]) for peer in sorted(result.receives)},
        )

    def _atoms(self, tensor: int, region: Rectangle) -> list[_Atom]:
        """Cut a region along every cut of either layout.

        An atom is an intersection of whole cells' rectangles with one another, whatever region the walk
        started from; that is what makes atoms the same on every rank.
        """
        atoms: list[_Atom] = [(region, (), ())]
        for is_target, side in enumerate((self.source, self.target)):
            for copy in _copies(side, tensor):
                cut: list[_Atom] = []
                for part, holders, needers in atoms:
                    for piece, cell in _cells(side, tensor, *copy, part):
                        cut.append(
                            (piece, holders, (*needers, cell))
                            if is_target
                            else (piece, (*holders, cell), needers)
                        )
                atoms = cut
        return atoms

    def _route(self, result: ExchangePlan, tensor: int, atom: _Atom, turn: int) -> None:
        rectangle, holders, needers = atom
        giver, takers = self._givers(holders, needers, turn)
        if giver == self.rank:
            result.keeps.append(self._move(tensor, rectangle, self.rank, self.rank))
        elif giver is not None:
            result.receives.setdefault(giver, []).append(self._move(tensor, rectangle, giver, self.rank))
        for taker in takers:
            result.sends.setdefault(taker, []).append(self._move(tensor, rectangle, self.rank, taker))

    def _givers(
        self, holder_cells: tuple[_Cell, ...], needer_cells: tuple[_Cell, ...], turn: int
    ) -> tuple[int | None, list[int]]:
        """Who gives an atom to this rank (None if it does not need it), and to whom this rank gives it."""
        holders, needers = self._ranks(self.source, holder_cells), self._ranks(self.target, needer_cells)
        cells = holder_cells, needer_cells
        if cells not in self._takers:
            holding = set(holders)
            self._takers[cells] = [rank for rank in needers if rank not in holding]
        takers = self._takers[cells]
        first = first_asked(len(holders), takers, turn) if takers else 0
        if (cells, first) not in self._given:
            giver = self.rank if self.rank in holders and self.rank in needers else None
            given = []
            for source, taker in share_out(holders, takers, self.ranks_per_node, first):
                if source == self.rank:
                    given.append(taker)
                elif taker == self.rank:
                    giver = source
            self._given[cells, first] = giver, given
        return self._given[cells, first]

    def _ranks(self, side: Placement, cells: tuple[_Cell, ...]) -> list[int]:
        """The ranks of some cells, ascending."""
        key = side is self.target, cells
        if key not in self._cell_ranks:
            everyone = range(side.layout.data)
            self._cell_ranks[key] = sorted(
                side.layout.rank_of(data=data, tensor=cell.tensor_rank, pipeline=cell.stage)
                for cell in cells
                for data in (everyone if cell.data_rank is None else (cell.data_rank,))
            )
        return self._cell_ranks[key]

    def _move(self, tensor: int, rectangle: Rectangle, source: int, target: int) -> Move:
        top, bottom, left, right = rectangle
        source_view = self._view(self.source, tensor, top, left, source)
        target_view = self._view(self.target, tensor, top, left, target)
        return Move(tensor, (top, bottom), (left, right), source_view, target_view)

    def _view(self, side: Placement, tensor: int, top: int, left: int, rank: int) -> View:
        stage, tensor_rank, data_rank = _place(side.layout, rank)
        if self.state_map.zero_stage == 0:
            data_rank = 0  # All the same, so worked out once.
        key = side is self.target, tensor, stage, tensor_rank, data_rank
        if key not in self._storages:
            low, high = side.columns(tensor, tensor_rank)
            piece = side.piece(tensor, stage, tensor_rank, data_rank)
            index = side.piece_index(tensor, stage, tensor_rank, data_rank)
            self._storages[key] = index, low + piece.flat_start, high - low, piece.group_offset
        index, skipped, width, start = self._storages[key]
        offset = top * width + left - skipped
        return View(index, offset, width, start + offset)


def merge(moves: list[Move]) -> list[Move]:
    """Join neighbouring rectangles of one pair of pieces.

    Within a pair of pieces a place in the tensor decides the place in storage, so two rectangles that make
    one rectangle of the tensor are one view on both sides.

    Args:
        moves: In the order of tensor, row, column; so is the result.
    """
    merged: list[Move] = []
    for move in moves:
        while merged and (joined := _join(merged[-1], move)) is not None:
            merged.pop()
            move = joined
        merged.append(move)
    return merged


def _join(first: Move, second: Move) -> Move | None:
    if first.tensor != second.tensor:
        return None
    beside = first.rows == second.rows and first.columns[1] == second.columns[0]
    below = first.columns == second.columns and first.rows[1] == second.rows[0]
    if not (beside or below):
        return None
    return first._replace(rows=(first.rows[0], second.rows[1]), columns=(first.columns[0], second.columns[1]))


def _place(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Stage, tensor rank and data rank."""
    place = layout.coordinates(rank)
    return place.pipeline, place.tensor, place.data


def _copies(side: Placement, tensor: int) -> list[tuple[int, Sequence[int]]]:
    """The complete copies of a tensor's shards: a stage and the tensor ranks that make up one copy."""
    tensor_ranks = range(side.layout.tensor)
    if side.state_map.tensors[tensor].shard_dim is None:
        return [(stage, (tensor_rank,)) for stage in side.stages(tensor) for tensor_rank in tensor_ranks]
    return [(stage, tensor_ranks) for stage in side.stages(tensor)]


def _cells(
    side: Placement, tensor: int, stage: int, tensor_ranks: Sequence[int], region: Rectangle
) -> Iterator[tuple[Rectangle, _Cell]]:
    """The cells of one copy that a region meets, each with a rectangle of the intersection."""
    top, bottom, left, right = region
    for tensor_rank in tensor_ranks:
        low, high = side.columns(tensor, tensor_rank)
        begin, end = max(low, left), min(high, right)
        if begin >= end:
            continue
        if side.state_map.zero_stage == 0:
            yield (top, bottom, begin, end), _Cell(stage, tensor_rank, None)
            continue
        # Partitions between the ones of the region's first and last element; those between may still miss it.
        width = high - low
        start = side.group_start(tensor, stage, tensor_rank)
        size = side.groups(stage, tensor_rank)[side.state_map.tensors[tensor].group].partition_numel
        first = (start + top * width + begin - low) // size
        last = (start + (bottom - 1) * width + end - 1 - low) // size
        for data_rank in range(first, last + 1):
            for part in side.rectangles(tensor, stage, tensor_rank, data_rank):
                common = _intersection(part, (top, bottom, begin, end))
                if common[0] < common[1] and common[2] < common[3]:
                    yield common, _Cell(stage, tensor_rank, data_rank)


def _intersection(one: Rectangle, other: Rectangle) -> Rectangle:
    """What two rectangles share; stops lie at or before starts if that is nothing."""
    return max(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), min(one[3], other[3])


def _turns(state_map: StateMap) -> list[int]:
    """For each tensor, how many of the same shape and cut come before it: the layers of a model repeat."""
    seen: dict[tuple, int] = {}
    turns = []
    for tensor in state_map.tensors:
        # Shapes start from different holders, lest the first of them serve one more of every shape.
        kind = (tensor.shape, tensor.shard_dim)
        turns.append(seen.setdefault(kind, len(seen)))
        seen[kind] += 1
    return turns
