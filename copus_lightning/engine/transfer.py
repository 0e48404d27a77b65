"""Carries out an exchange plan between the ranks of the WORLD group.

Pieces are packed per peer into one bounded buffer and sent rank to rank; what a rank keeps is copied locally.
Peers meet in the rounds of a round-robin tournament, so that every rank talks to one other at a time and no
cycle can form; a pair that has nothing to exchange skips its round without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from copus_lightning.engine.exchange import ExchangePlan, Move, View

DEFAULT_BUFFER_BYTES = 64 * 2**20
LARGE = 64 * 2**10
"""Elements from which on a piece travels as a message of its own."""


class Storages(NamedTuple):
    """Flat fp32 storages of a rank's pieces: by piece index, one 1-D tensor per state key of its group."""

    by_piece: Sequence[dict[str, torch.Tensor]]

    def view(self, view: View, shape: tuple[int, int], key: str) -> torch.Tensor:
        """A move's rectangle as a strided view of the piece's storage."""
        storage = self.by_piece[view.piece][key]
        offset = storage.storage_offset() + view.offset
        return torch.as_strided(storage, shape, (view.stride, 1), offset)


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

    Attributes:
        bytes_sent: Bytes that left this rank.
        bytes_received: Bytes that came from others.
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
    ) -> None:
        self.plan, self.source, self.target, self.keys = plan, source, target, keys
        self.group, self.device = group, device
        self.half = max(buffer_bytes // 8, 2) // 2 * 2  # fp32 elements in half a buffer, an even number
        self.bytes_sent = self.bytes_received = 0
        self.tamper: Callable[[torch.Tensor], None] | None = None
        self._outgoing: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None

    @property
    def state_bytes(self) -> int:
        """The pieces on both sides and the buffer."""
        sides = (self.source.by_piece, self.target.by_piece)
        pieces = sum(t.numel() * 4 for side in sides for piece in side for t in piece.values())
        return pieces + 8 * self.half

    @torch.no_grad()
    def run(self) -> None:
        """Moves everything. Collective over the ranks that have something to exchange with one another.

        Raises:
            RuntimeError: What arrived has another checksum than what was sent.
        """
        for move in self.plan.keeps:
            for key in self.keys[move.tensor]:
                self.target.view(move.target, move.shape, key).copy_(
                    self.source.view(move.source, move.shape, key)
                )
        for peer in rounds(dist.get_world_size(), self.plan.rank):
            self._with_peer(peer)

    def _with_peer(self, peer: int) -> None:
        sends = list(self._chunks(self.plan.sends.get(peer, []), self.source, "source"))
        receives = list(self._chunks(self.plan.receives.get(peer, []), self.target, "target"))
        sent: list[torch.Tensor] = []
        arrived: list[torch.Tensor] = []
        for index in range(max(len(sends), len(receives))):
            operations = []
            if index < len(sends):
                payload = self._pack(sends[index])
                sent.append(_checksum(payload))
                if self.tamper is not None:
                    payload = payload.clone()
                    self.tamper(payload)
                operations.append(dist.P2POp(dist.isend, payload, peer, self.group))
                self.bytes_sent += payload.numel() * 4
            if index < len(receives):
                incoming = self._landing(receives[index])
                operations.append(dist.P2POp(dist.irecv, incoming, peer, self.group))
                self.bytes_received += incoming.numel() * 4
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if index < len(receives):
                arrived.append(_checksum(incoming))
                self._unpack(receives[index], incoming)
        self._compare(peer, sent, arrived)

    def _compare(self, peer: int, sent: list[torch.Tensor], arrived: list[torch.Tensor]) -> None:
        """Exchanges the checksums of all messages."""
        operations = []
        if sent:
            operations.append(dist.P2POp(dist.isend, torch.stack(sent), peer, self.group))
        if arrived:
            mine = torch.stack(arrived)
            theirs = torch.empty_like(mine)
            operations.append(dist.P2POp(dist.irecv, theirs, peer, self.group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if arrived and not torch.equal(mine, theirs):
            raise RuntimeError(f"a piece of state from rank {peer} arrived corrupted (checksum)")

    def _chunks(self, moves: Sequence[Move], storages: Storages, side: str) -> Iterator[list[torch.Tensor]]:
        """Views in sending order, cut so that each chunk fits into half a buffer. Equal on both ends."""
        chunk: list[torch.Tensor] = []
        room = self.half
        for move in moves:
            for key in self.keys[move.tensor]:
                for part in self._fitting(storages.view(getattr(move, side), move.shape, key)):
                    if part.numel() >= LARGE:  # alone, so that it needs no packing where it is contiguous
                        yield [part]
                        continue
                    if part.numel() > room:
                        yield chunk
                        chunk, room = [], self.half
                    chunk.append(part)
                    room -= part.numel()
        if chunk:
            yield chunk

    def _fitting(self, view: torch.Tensor) -> Iterator[torch.Tensor]:
        """A matrix in parts of at most half a buffer: blocks of rows, or parts of a row that is longer."""
        columns = view.shape[1]
        if columns > self.half:
            for row in view.split(1):
                yield from row.split(self.half, dim=1)
        else:
            yield from view.split(max(self.half // columns, 1))

    def _pack(self, views: list[torch.Tensor]) -> torch.Tensor:
        """The views in one flat tensor: the storage itself where it is one contiguous piece on the right device."""
        if len(views) == 1 and views[0].is_contiguous() and views[0].device == self.device:
            return views[0].view(-1)
        if self._outgoing is None:
            self._outgoing = torch.empty(self.half, device=self.device)
        at = 0
        for view in views:
            self._outgoing[at : at + view.numel()].view(view.shape).copy_(view)
            at += view.numel()
        return self._outgoing[:at]

    def _landing(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Where a message arrives: in its place where that is one contiguous piece, else in the buffer."""
        if len(views) == 1 and views[0].is_contiguous() and views[0].device == self.device:
            return views[0].view(-1)
        if self._incoming is None:
            self._incoming = torch.empty(self.half, device=self.device)
        return self._incoming[: sum(view.numel() for view in views)]

    @staticmethod
    def _unpack(views: list[torch.Tensor], message: torch.Tensor) -> None:
        if len(views) == 1 and views[0].data_ptr() == message.data_ptr():
            return
        at = 0
        for view in views:
            view.copy_(message[at : at + view.numel()].view(view.shape))
            at += view.numel()


def _checksum(message: torch.Tensor) -> torch.Tensor:
    """Sum of the bits, two elements at a time as 64-bit integers, wrapping around; 0-d int64."""
    if message.data_ptr() % 8:
        message = message.clone()  # both ends must pair the elements alike
    even = message.numel() - message.numel() % 2
    rest = message[even:].view(torch.int32).sum(dtype=torch.int64)
    return message[:even].view(torch.int64).sum() + rest
