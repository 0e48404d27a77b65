"""A rank's state apart from any layout that is alive, and its way from one layout into the next and back.

All state keys (masters, then each moment) can travel together, or one after the other. In the second way a key is
freed in the old layout once all ranks have it in the new one, before the next one gets its memory there: the states
of two layouts never stand side by side. If a later part fails, what was freed travels back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from copus_lightning.core.layout import Layout
from copus_lightning.engine.exchange import ExchangePlan
from copus_lightning.engine.failures import forget_tracebacks
from copus_lightning.engine.groups import LayoutGroups
from copus_lightning.engine.transfer import Exchange, Storages

if TYPE_CHECKING:
    from copus_lightning.engine.assembly import Assembler, Live


@dataclass
class Held:
    """A rank's pieces of state, apart from any layout that is alive.

    Attributes:
        layout: The layout that the pieces are of.
        storages: Flat fp32 storage of each piece, by state key.
        scalars: Step counts by user group; empty before the first optimizer step.
    """

    layout: Layout
    storages: Storages
    scalars: dict[int, dict[str, Any]]

    def drop(self, keys: Collection[str]) -> None:
        """Lets go of some keys' storages."""
        for piece in self.storages.by_piece:
            for key in keys:
                piece.pop(key, None)


def hold(assembler: Assembler, live: Live, scalars: dict[int, dict[str, Any]], on_host: bool) -> Held:
    """References to a layout's own pieces of state, which outlive it; with ``on_host`` copies off the device."""
    storages = live.storages(assembler.handle.all_keys(bool(scalars)))
    if on_host and assembler.device.type != "cpu":
        storages = Storages([{k: _to_host(v) for k, v in piece.items()} for piece in storages.by_piece])
    return Held(live.layout, storages, scalars)


def hold_after_failure(assembler: Assembler, live: Live, scalars: dict[int, dict[str, Any]]) -> Held:
    """As :func:`hold`, off the device so that it can be built anew; where host memory is short, on the device."""
    try:
        return hold(assembler, live, scalars, on_host=True)
    except Exception as error:
        forget_tracebacks(error)
    return hold(assembler, live, scalars, on_host=False)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


class Carrier:
    """Brings held state into a new layout.

    Args:
        assembler: Of the engine.
        held: What is carried. One by one, its storages are let go of as they arrive.
        new: The layout that is filled.
        plan: From the held layout to the new one.
        one_by_one: A state key at a time. Alike on all ranks.
        staged: Some rank's pieces are not on its device. Alike on all ranks.

    Attributes:
        parts: State keys that travel together.
        bytes_received: Bytes that came from other ranks.
        state_bytes: Most that this rank had at a time of old pieces, new pieces and buffer.
        tamper: See :class:`~copus_lightning.engine.transfer.Exchange`.
    """

    def __init__(
        self,
        assembler: Assembler,
        held: Held,
        new: Live,
        plan: ExchangePlan,
        one_by_one: bool,
        staged: bool,
    ) -> None:
        self.assembler, self.held, self.plan = assembler, held, plan
        keys = assembler.handle.all_keys(bool(held.scalars))
        self.one_by_one = one_by_one
        self.parts: list[tuple[str, ...]] = [(key,) for key in keys] if one_by_one else [keys]
        self.staged = staged
        self.bytes_received = self.state_bytes = 0
        self.tamper: Callable[[torch.Tensor], None] | None = None
        self._new: Live | None = new
        self._new_layout = new.layout
        self._arrived: list[str] = []
        self._freed: list[str] = []
        self._carried: Storages | None = None
        self._first: Exchange | None = self._exchange(new, self.parts[0])

    def _exchange(self, new: Live, part: Sequence[str]) -> Exchange:
        source, target = self.held.storages, new.storages(part)
        return _exchange(self.assembler, self.plan, source, target, part, new.groups, self.staged)

    def move(self, part: Sequence[str]) -> None:
        """Carries some keys. Collective.

        Raises:
            RuntimeError: What arrived has another checksum than what was sent.
        """
        new = self._new
        assert new is not None
        exchange, self._first = self._first or self._exchange(new, part), None
        exchange.tamper = self.tamper
        exchange.run()
        self.bytes_received += exchange.bytes_received
        self._arrived += part
        there = self.held.storages.nbytes + new.storages(self._arrived).nbytes + exchange.buffer_nbytes
        self.state_bytes = max(self.state_bytes, there)

    def arrived(self, part: Sequence[str]) -> None:
        """To be called once all ranks agree that a part has arrived."""
        if self.one_by_one:
            self.held.drop(part)
            self._freed += part

    def let_go(self) -> None:
        """To be called before the new layout is closed: keeps what only that has."""
        self._first = None
        if self._new is not None:
            self._carried = self._new.storages(self._freed)
            self._new = None

    def take_back(self, groups: LayoutGroups) -> Live:
        """The held layout again, bit for bit, from this rank's own pieces and from what has travelled. Collective."""
        if not self._freed:
            return restore(self.assembler, groups, self.held)
        assembler, carried = self.assembler, self._carried
        assert carried is not None
        live = assembler.materialise(assembler.prepare(groups))
        # Point-to-point messages alone may not be what NCCL's communicator of a group begins with.
        dist.all_reduce(torch.zeros(1, device=assembler.device), group=groups.world)
        way_back = assembler.plan(self._new_layout, self.held.layout)
        for key in self._freed:
            _exchange(assembler, way_back, carried, live.storages((key,)), (key,), groups).run()
            for piece in carried.by_piece:
                piece.pop(key, None)
        _fill(live, self.held)
        assembler.settle(live, self.held.scalars)
        return live


def restore(assembler: Assembler, groups: LayoutGroups, held: Held) -> Live:
    """The held layout again, from this rank's own pieces. Communicates only to gather low-precision weights."""
    live = assembler.materialise(assembler.prepare(groups))
    _fill(live, held)
    assembler.settle(live, held.scalars)
    return live


def _fill(live: Live, held: Held) -> None:
    """Copies held pieces to where they were, key by key, and lets go of them."""
    for key in dict.fromkeys(key for piece in held.storages.by_piece for key in piece):
        for target, source in zip(live.storages((key,)).by_piece, held.storages.by_piece, strict=True):
            if key in source:
                target[key].copy_(source.pop(key))


def _exchange(
    assembler: Assembler,
    plan: ExchangePlan,
    source: Storages,
    target: Storages,
    part: Sequence[str],
    groups: LayoutGroups,
    staged: bool = False,
) -> Exchange:
    handle = assembler.handle
    wanted = [tuple(k for k in handle.keys(group) if k in part) for group in range(len(handle.schemas))]
    keys = [wanted[tensor.group] for tensor in assembler.state_map.tensors]
    buffer_bytes = assembler.settings.buffer_bytes
    return Exchange(
        plan,
        source,
        target,
        keys,
        groups.world,
        assembler.device,
        buffer_bytes,
        assembler.flat_groups,
        staged,
    )
