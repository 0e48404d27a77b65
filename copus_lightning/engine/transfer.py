"""Carries out an exchange plan between the ranks of a layout.

Pieces that lie side by side on both ends count as one. Large ones go straight from the old place to the new one, all
posted at once; while they travel, a rank copies what it keeps and sums up what it sends. Small and strided pieces are
packed per peer into one bounded buffer, filled and emptied while another part of it travels. There, peers meet in the
rounds of a round-robin tournament, so that every rank talks to one other at a time and no cycle can form; a pair that
has nothing to exchange skips its round without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from copus_lightning.engine.exchange import ExchangePlan, Move, View

DEFAULT_BUFFER_BYTES = 64 * 2**20
LARGE = 64 * 2**10
"""Elements from which on a contiguous piece travels without the buffer."""
PART = 2**20
"""Elements of its messages: small enough to be summed up from the processor's cache when they arrive."""
SLOTS = 2
"""Parts of the buffer for each direction: one travels while another is filled or emptied."""
ELEMENT_BYTES = 4

Message = list[torch.Tensor]
"""Matrices that travel together, one after the other."""


class Storages(NamedTuple):
    """Flat fp32 storages of a rank's pieces: by piece index, one 1-D tensor per state key of its group."""

    by_piece: Sequence[dict[str, torch.Tensor]]

    def view(self, view: View, shape: tuple[int, int], key: str) -> torch.Tensor:
        """A move's rectangle as a strided view of the piece's storage."""
        storage = self.by_piece[view.piece][key]
        offset = storage.storage_offset() + view.offset
        return torch.as_strided(storage, shape, (view.stride, 1), offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(t.numel() * ELEMENT_BYTES for piece in self.by_piece for t in piece.values())


def rounds(world_size: int, rank: int) -> Iterator[int]:
    """The peers of ``rank`` in tournament order: in each round the pairs of all ranks are disjoint."""
    n = world_size + world_size % 2
    for r in range(n - 1):
        if rank == n - 1:
            peer = next(i for i in range(n - 1) if (2 * i - r) % (n - 1) == 0)
        else:
            peer = (r - rank) % (n - 1)
            if peer == rank:
                peer = n - 1
        if peer < world_size:
            yield peer


class Exchange:
    """One rank's part in an exchange.

    Args:
        plan: What to keep, send and receive.
        source: Storages of the pieces under the old layout.
        target: Storages of the pieces under the new layout.
        keys: State keys that travel for each tensor, by tensor index.
        group: Group of all ranks over which pieces travel.
        device: Where the backend wants its buffers.
        buffer_bytes: Size of the buffer; half serves sending and half receiving.
        flat_groups: Param group of each tensor if the pieces of a group lie end to end in one flat storage on all
            ranks, else None.
        staged: Some rank's pieces are not on its device, so all travel through the buffers. Alike on all ranks.

    Attributes:
        bytes_received: Bytes that came from others.
        tamper: Called with a copy of each message before it is sent. For tests.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        source: Storages,
        target: Storages,
        keys: Sequence[tuple[str, ...]],
        group: ProcessGroup | None,
        device: torch.device,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        flat_groups: Sequence[int] | None = None,
        staged: bool = False,
    ) -> None:
        self.plan, self.source, self.target, self.keys = plan, source, target, keys
        self.group, self.device, self.flat_groups, self.staged = group, device, flat_groups, staged
        self.slot = max(buffer_bytes // (2 * SLOTS * ELEMENT_BYTES), 2) // 2 * 2  # elements, an even number
        self.bytes_received = 0
        self.tamper: Callable[[torch.Tensor], None] | None = None
        self._buffer: torch.Tensor | None = None
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._arrived: dict[int, list[torch.Tensor]] = {}
        # For each peer in order of meeting, what goes to it and what comes from it.
        self._messages = [
            (
                peer,
                self._cut(plan.sends.get(peer, []), source, "source"),
                self._cut(plan.receives.get(peer, []), target, "target"),
            )
            for peer in rounds(dist.get_world_size(), plan.rank)
        ]

    @property
    def buffer_nbytes(self) -> int:
        """Size of the buffer."""
        return 2 * SLOTS * self.slot * ELEMENT_BYTES

    @torch.no_grad()
    def run(self) -> None:
        """Moves everything. Collective over the ranks that have something to exchange with one another.

        Raises:
            RuntimeError: What arrived has another checksum than what was sent.
        """
        large = [self._post(peer, out.large, incoming.large) for peer, out, incoming in self._messages]
        self._meanwhile(large)
        for flight in large:
            self._land(flight)
        for peer, out, incoming in self._messages:
            self._ferry(peer, out.packed, incoming.packed)
        self._compare()

    # -- what stays, and what to do meanwhile --------------------------------------------------------------------

    def _meanwhile(self, flights: Sequence[_Flight]) -> None:
        """Copies what stays and sums up what is under way, in the order in which it lies in memory.

        What both stays and goes is then still in the processor's cache the second time.
        """
        work: list[tuple[int, Callable[[], torch.Tensor]]] = []
        for run in self._runs(self.plan.keeps):
            for key in self.keys[run.tensor]:
                old = self.source.view(run.source, run.shape, key)
                new = self.target.view(run.target, run.shape, key)
                if run.contiguous:
                    olds, news = old.view(-1).split(PART), new.view(-1).split(PART)
                else:
                    olds, news = (old,), (new,)
                for mine, target in zip(olds, news, strict=True):
                    work.append((mine.data_ptr(), partial(target.copy_, mine, non_blocking=True)))
        for flight in flights:
            for number, message in enumerate(flight.sends):
                work.append((message.data_ptr(), partial(flight.sum_up, number)))
        for _, do in sorted(work, key=itemgetter(0)):
            do()

    def _runs(self, moves: Sequence[Move]) -> list[_Run]:
        """The moves, those that lie side by side in flat storages of both ends joined; alike on both ends."""
        runs: list[_Run] = []
        for move in moves:
            run = _Run(move.tensor, move.shape, move.source, move.target)
            if not run.contiguous:
                runs.append(run)
                continue
            run = run._replace(shape=(1, move.numel))
            last = runs[-1] if runs else None
            if last is not None and self._follows(last, run):
                runs[-1] = last._replace(shape=(1, last.numel + run.numel))
            else:
                runs.append(run)
        return runs

    def _follows(self, last: _Run, run: _Run) -> bool:
        groups = self.flat_groups
        return (
            groups is not None
            and not self.staged
            and last.contiguous
            and groups[last.tensor] == groups[run.tensor]
            and last.source.position + last.numel == run.source.position
            and last.target.position + last.numel == run.target.position
        )

    # -- what travels --------------------------------------------------------------------------------------------

    def _cut(self, moves: Sequence[Move], storages: Storages, side: str) -> _Messages:
        """Cuts moves with one peer into messages, alike on both ends."""
        large: list[torch.Tensor] = []
        packed: list[Message] = []
        room = 0
        for run in self._runs(moves):
            needs_no_buffer = run.contiguous and run.numel >= LARGE and not self.staged
            for key in self.keys[run.tensor]:
                view = storages.view(getattr(run, side), run.shape, key)
                if needs_no_buffer:
                    large.extend(view.view(-1).split(PART))
                    continue
                for part in self._fitting(view):
                    if part.numel() > room:
                        packed.append([])
                        room = self.slot
                    packed[-1].append(part)
                    room -= part.numel()
        return _Messages(large, packed)

    def _fitting(self, view: torch.Tensor) -> Iterator[torch.Tensor]:
        """A matrix in parts of at most a slot: blocks of rows, or parts of a row that is longer."""
        columns = view.shape[1]
        if columns > self.slot:
            for row in view.split(1):
                yield from row.split(self.slot, dim=1)
        else:
            yield from view.split(max(self.slot // columns, 1))

    def _post(self, peer: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> _Flight:
        """Begins to send and to receive flat messages."""
        payloads = list(sends)
        if self.tamper is not None:
            payloads = [payload.clone() for payload in payloads]
            for payload in payloads:
                self.tamper(payload)
        # Receives first: whoever waits for them in order has work to do while the rest travels.
        operations = [dist.P2POp(dist.irecv, message, peer, self.group) for message in receives]
        operations += [dist.P2POp(dist.isend, payload, peer, self.group) for payload in payloads]
        works = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_received += sum(message.numel() for message in receives) * ELEMENT_BYTES
        return _Flight(peer, list(sends), payloads, list(receives), works, {})

    def _land(self, flight: _Flight) -> None:
        """Waits for the messages and sums up what was sent and what arrived."""
        self._sent.setdefault(flight.peer, []).extend(map(flight.sum_up, range(len(flight.sends))))
        works = flight.works
        if len(works) != len(flight.receives) + len(flight.payloads):  # one for all of them
            for work in works:
                work.wait()
            works = []
        arrived = self._arrived.setdefault(flight.peer, [])
        for index, message in enumerate(flight.receives):
            if works:
                works[index].wait()
            arrived.append(_checksum(message))
        for work in works[len(flight.receives) :]:
            work.wait()

    def _ferry(self, peer: int, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Packs, sends, receives and unpacks: one message is on its way while its neighbours are handled."""
        flying: deque[tuple[_Flight, Message]] = deque()
        for index in range(max(len(sends), len(receives))):
            outgoing, incoming = [], []
            if index < len(sends):
                outgoing = [self._pack(sends[index], index % SLOTS)]
            if index < len(receives):
                size = sum(view.numel() for view in receives[index])
                incoming = [self._slot(SLOTS + index % SLOTS)[:size]]
            views = receives[index] if incoming else []
            flying.append((self._post(peer, outgoing, incoming), views))
            if len(flying) == SLOTS:
                self._unload(*flying.popleft())
        while flying:
            self._unload(*flying.popleft())

    def _slot(self, number: int) -> torch.Tensor:
        """One part of the buffer."""
        if self._buffer is None:
            self._buffer = torch.empty(2 * SLOTS, self.slot, device=self.device)
        return self._buffer[number]

    def _pack(self, views: Message, slot: int) -> torch.Tensor:
        buffer, at = self._slot(slot), 0
        for view in views:
            buffer[at : at + view.numel()].view(view.shape).copy_(view, non_blocking=True)
            at += view.numel()
        return buffer[:at]

    def _unload(self, flight: _Flight, views: Message) -> None:
        self._land(flight)
        at = 0
        for view in views:
            message = flight.receives[0][at : at + view.numel()]
            view.copy_(message.view(view.shape), non_blocking=True)
            at += view.numel()

    def _compare(self) -> None:
        """Exchanges the checksums of all messages."""
        operations: list[dist.P2POp] = []
        senders, mine, theirs = [], [], []
        for peer, sums in self._sent.items():
            if sums:
                operations.append(dist.P2POp(dist.isend, torch.stack(sums), peer, self.group))
        for peer, sums in self._arrived.items():
            if sums:
                mine.append(torch.stack(sums))
                theirs.append(torch.empty_like(mine[-1]))
                operations.append(dist.P2POp(dist.irecv, theirs[-1], peer, self.group))
                senders.append(peer)
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for peer, here, there in zip(senders, mine, theirs, strict=True):
            if not torch.equal(here, there):
                raise RuntimeError(f"a piece of state from rank {peer} arrived corrupted (checksum)")


class _Run(NamedTuple):
    """Elements that move together: rows of one piece, or (as one row) what several pieces have side by side."""

    tensor: int
    shape: tuple[int, int]
    source: View
    target: View

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape[0] * self.shape[1]

    @property
    def contiguous(self) -> bool:
        """On both ends."""
        rows, columns = self.shape
        return rows == 1 or self.source.stride == columns == self.target.stride


class _Messages(NamedTuple):
    """What goes one way between two ranks: flat messages that need no buffer, and what is to be packed."""

    large: list[torch.Tensor]
    packed: list[Message]


class _Flight(NamedTuple):
    """Messages under way between this rank and a peer."""

    peer: int
    sends: list[torch.Tensor]
    payloads: list[torch.Tensor]
    receives: list[torch.Tensor]
    works: list[Work]
    sums: dict[int, torch.Tensor]

    def sum_up(self, number: int) -> torch.Tensor:
        """Checksum of a message that is sent; worked out once."""
        if number not in self.sums:
            self.sums[number] = _checksum(self.sends[number])
        return self.sums[number]


def _checksum(message: torch.Tensor) -> torch.Tensor:
    """Sum of the bits, two elements at a time as 64-bit integers, wrapping around; 0-d int64."""
    if message.data_ptr() % 8:
        message = message.clone()  # both ends must pair the elements alike
    even = message.numel() - message.numel() % 2
    rest = message[even:].view(torch.int32).sum(dtype=torch.int64)
    return message[:even].view(torch.int64).sum() + rest
