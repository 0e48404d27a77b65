"""How all ranks come to know that one of them failed.

Collectives of a layout hang or break when a rank leaves them, so agreement uses channels of its own: a gloo group
of all ranks that carries nothing else, and, if that breaks too, a roll-call over the rendezvous store, which
tells who is still there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from copus_lightning.engine.failures import MEMORY, OTHER, Failure, RankLost

ROLL_CALL_SECONDS = 5.0


_numbers = itertools.count()
"""Keeps the keys of this process's agreements apart in the store."""


class Agreement:
    """Agreement of all ranks. Collective to make, like every call.

    Args:
        timeout_seconds: Longest wait for another rank.

    Attributes:
        progress: Optimizer steps made, which need no agreement: a failure that is announced in the next one does not
            reach a rank before it is there.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_seconds = timeout_seconds
        timeout = timedelta(seconds=timeout_seconds)
        self._group: ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        # The largest counts: a rank that was in other worlds before has made other agreements than its peers.
        number = self.largest(next(_numbers))
        # A connection of its own, where torch (2.8) can: whoever waits in the store keeps its connection to itself.
        store = dist.distributed_c10d._get_default_store()
        store = getattr(store, "clone", lambda: store)()
        self._store = dist.PrefixStore(f"copus-{number}", store)
        self._calls = self.progress = 0
        self._lock = threading.Lock()
        self._handled = 0

    def announce(self) -> None:
        """Tells the others, who may wait for this rank elsewhere, that it failed and comes to the next agreement."""
        with contextlib.suppress(Exception):
            self._store.add(self._failed_key(self._calls + 1), 1)

    def _failed_key(self, number: int) -> str:
        return f"failed/{number}/{self.progress}"

    def if_announced(self, then: Callable[[], None]) -> None:
        """Calls ``then``, once, if a rank has announced a failure and this one is not on its way to the agreement.

        May be called from another thread; this rank does not come to the agreement before ``then`` returns.
        """
        number = self._calls + 1
        if number == self._handled or not self._store.check([self._failed_key(number)]):
            return
        with self._lock:
            if self._calls + 1 == number:
                self._handled = number
                then()

    def agree(self, phase: str, failure: Failure | None) -> list[Failure]:
        """Every rank says how it went; every rank gets the failures of all. Empty if all went well.

        Raises:
            RankLost: A rank did not answer within the time-out.
        """
        with self._lock:
            self._calls += 1
        if self._group is None:  # a rank was lost already: without a group the WORLD's would be taken
            self._roll_call(phase, failure)
        flag = torch.tensor([failure is not None], dtype=torch.int32)
        try:
            dist.all_reduce(flag, group=self._group)
            if not flag.item():
                return []
            everyone: list[Failure | None] = [None] * self.world_size
            dist.all_gather_object(everyone, failure, group=self._group)
        except Exception as error:
            error.__traceback__ = None
            self._roll_call(phase, failure)
        return [f for f in everyone if f is not None]

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        box = torch.tensor([number])
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return int(box)

    def meet(self, key: str, poll_seconds: float = 0.002) -> None:
        """Waits until every rank has come to the same ``key``, through the store alone.

        May be called from a helper thread. A key is used once.

        Raises:
            RuntimeError: A rank has :meth:`warn`\\ ed that it will not come, or did not come in time.
        """
        self._store.add(f"{key}/here", 1)
        deadline = time.monotonic() + self.timeout_seconds
        while self._store.add(f"{key}/here", 0) < self.world_size:
            if self._store.add(f"{key}/off", 0):
                raise RuntimeError(f"connection closed: another rank does not come to {key}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out waiting for all ranks in {key}")
            time.sleep(poll_seconds)

    def warn(self, key: str) -> None:
        """Tells those who wait in :meth:`meet` that this rank will not come."""
        with contextlib.suppress(Exception):
            self._store.add(f"{key}/off", 1)

    def _roll_call(self, phase: str, failure: Failure | None) -> NoReturn:
        """Finds out who does not answer, and says so on every rank that does."""
        self.close()  # wakes those who still wait for this rank in it
        wait = min(ROLL_CALL_SECONDS, self.timeout_seconds / 3)
        call = f"{self._calls}"
        try:
            self._store.set(f"{call}/{self.rank}", "here")
            missing = self._missing(call, wait)
            if self.rank == 0:  # this rank may keep the store: let the others read first
                self._linger(call, missing, wait)
            else:
                self._store.set(f"{call}/read/{self.rank}", "read")
        except Exception as error:
            error.__traceback__ = None
            missing = [0]
        names = ", ".join(str(r) for r in missing) if missing else "some rank"
        plural = "s" if len(missing) > 1 else ""
        own = ""
        if failure is not None and failure.kind in (MEMORY, OTHER):
            own = f"; before that rank {self.rank} itself failed: {failure.reason}"
        raise RankLost(
            f"rank{plural} {names} stopped answering in phase '{phase}' (noticed by rank {self.rank}): the run "
            "cannot go on; start it again from its last checkpoint (copus fit: run.resume=auto)" + own
        )

    def _missing(self, call: str, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        absent = list(range(self.world_size))
        while absent and time.monotonic() < deadline:
            absent = [r for r in absent if not self._store.check([f"{call}/{r}"])]
            if absent:
                time.sleep(0.05)
        return absent

    def _linger(self, call: str, missing: list[int], seconds: float) -> None:
        present = [r for r in range(1, self.world_size) if r not in missing]
        with contextlib.suppress(Exception):
            self._store.wait([f"{call}/read/{r}" for r in present], timedelta(seconds=2 * seconds))

    def close(self) -> None:
        """Ends the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
