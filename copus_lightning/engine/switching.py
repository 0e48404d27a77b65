"""A switch as a transaction: it happens wholly, or every rank is back where it was.

| phase      | what happens                                             | needs the old state | communicates |
|------------|----------------------------------------------------------|---------------------|--------------|
| `groups`   | process groups of the new layout                         | no                  | store only   |
| `prepare`  | exchange plan, module skeleton, DeepSpeed's set-up; on   | no                  | no           |
|            | the CPU also the new layout's memory                     |                     |              |
| `drain`    | the preparation and work on the device come to an end    | no                  | no           |
| `stage`    | this rank's pieces are held, step counts agreed on       | yes                 | yes          |
| `free`     | the old layout is taken down                             | yes                 | no           |
| `build`    | the new layout gets its memory                           | no                  | no           |
| `exchange` | pieces travel from rank to rank                          | yes                 | yes          |
| `load`     | weights are recast from the masters                      | no                  | yes          |

`groups` and `prepare` can run in a helper thread while training goes on; the pause is the rest. After every
phase (and, where states travel one by one, after each of them in `exchange`) all ranks agree that it went well; if
one rank failed, all take the old layout up again, see :mod:`copus_lightning.engine.carrying`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine.carrying import Carrier, Held, hold, hold_after_failure, restore
from copus_lightning.engine.exchange import ExchangePlan
from copus_lightning.engine.failures import MEMORY, Failure, SwitchFailed, causes, describe, log_traceback
from copus_lightning.engine.memory import PeakMemory, trim

if TYPE_CHECKING:
    from copus_lightning.engine.assembly import Live, Prepared
    from copus_lightning.engine.engine import Engine

T = TypeVar("T")
OVERLAPPED = ("groups", "prepare")
DROP_SECONDS = 10.0
PHASES = (*OVERLAPPED, "drain", "stage", "free", "build", "exchange", "load")


class Laps:
    """Seconds of phases, each of which begins where the one before it ended, so that they sum to the whole.

    Attributes:
        seconds: Of each phase that has ended; of one that has ended several times, together.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = self._ended = time.perf_counter()

    def end(self, phase: str) -> None:
        """Counts all since the last phase's end as part of this one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._ended
        self._ended = now

    @property
    def total_seconds(self) -> float:
        """From the beginning to the last phase's end."""
        return self._ended - self._started


@dataclass
class SwitchReport:
    """What one switch cost.

    Attributes:
        source: Where the run was.
        target: Where it is now.
        layout_changed: False for a change of batch or micro-batch alone, which rebuilds nothing.
        seconds: Of each phase on this rank, see the table above; ``groups`` and ``prepare`` ran while training
            went on if the switch was prepared.
        total_seconds: Of the pause, on this rank: its phases together.
        overlapped: ``groups`` and ``prepare`` are not part of the pause.
        bytes_moved: Bytes of state that crossed from rank to rank, over all ranks.
        bytes_received: Of them, those that this rank received.
        bytes_lower_bound: What ranks need and did not hold, over all ranks.
        host_peak_bytes: Most host memory that this rank took on top of what it had before.
        state_bytes: Most that this rank had at a time of pieces before, pieces after, and the buffer: what
            ``host_peak_bytes`` may reach.
    """

    source: Configuration
    target: Configuration
    layout_changed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    overlapped: bool = False
    bytes_moved: int = 0
    bytes_received: int = 0
    bytes_lower_bound: int = 0
    host_peak_bytes: int = 0
    state_bytes: int = 0


class Preparation:
    """Everything of a new layout that needs no old state, made in a helper thread or at once.

    Collective: every rank prepares the same configurations in the same order, counted by ``number``.

    Args:
        engine: What it is for.
        target: The configuration to prepare.
        number: Of this engine's preparations.
        pause: Where its time counts, if training waits for it; None for a helper thread.
    """

    def __init__(self, engine: Engine, target: Configuration, number: int, pause: Laps | None) -> None:
        self.target = target
        self.source_layout: Layout = engine.layout
        self.laps = pause or Laps()
        self.prepared: Prepared | None = None
        self.plan: ExchangePlan | None = None
        self.missing: list[int] = []
        self.failure: Failure | None = None
        self._key = f"preparation {number}"
        self._timeout_seconds = engine.settings.timeout_seconds
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        if pause is None:
            self._thread = threading.Thread(
                target=self._run, args=(engine,), name="copus-prepare", daemon=True
            )
            self._thread.start()
        else:
            self._run(engine)

    @property
    def overlapped(self) -> bool:
        """Made while training went on."""
        return self._thread is not None

    def is_for(self, source: Layout, target: Layout) -> bool:
        """Whether it leads from one to the other."""
        return self.source_layout == source and self.target.layout == target

    @property
    def finished(self) -> bool:
        """Nothing is left to wait for on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the helper thread, whose own waits for other ranks end in time."""
        self.settle()
        if not self.finished:
            self._cancelled.set()
            self.failure = Failure(-1, "error", "the preparation timed out")
        if self.prepared is None and self.failure is None:
            self.failure = Failure(-1, "error", "the helper thread that prepares the layout was killed")

    def settle(self) -> None:
        """Waits until the helper thread makes no more groups, so that another thread can. Collective."""
        if self._thread is not None:
            self._thread.join(2 * self._timeout_seconds)

    def drop(self) -> None:
        """Frees what was prepared, if it is not the live layout by now."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(DROP_SECONDS)  # it may wait for a rank that is gone
        if self.prepared is not None:
            self.prepared.close()
            self.prepared = None

    def _run(self, engine: Engine) -> None:
        prepared: Prepared | None = None
        try:
            engine.fault("groups")
            engine.agreement.meet(self._key)
            groups = engine.groups.get(self.target.layout)
            self.laps.end("groups")
            engine.fault("prepare")
            trim()  # what the switch before has freed
            self.plan = engine.assembler.plan(self.source_layout, self.target.layout)
            self.missing = engine.assembler.missing_elements(self.source_layout, self.target.layout)
            prepared = engine.assembler.prepare(groups)
            if not engine.one_by_one:
                engine.assembler.allocate(prepared, engine.has_state)
            if self._cancelled.is_set():  # nobody waits for it any more
                prepared.close()
                return
            self.prepared = prepared
            self.laps.end("prepare")
        except BaseException as error:  # whatever ends the thread is agreed on by all ranks
            if prepared is not None:
                prepared.close()
            log_traceback(error, engine.rank)
            self.failure = describe(error, engine.rank)
            engine.agreement.warn(self._key)
            if self._thread is None and not isinstance(error, Exception):
                raise  # the user's interrupt


class _Failed(Exception):
    def __init__(self, phase: str, failures: list[Failure]) -> None:
        super().__init__(phase)
        self.phase, self.failures = phase, failures


class Switch:
    """One change of layout of an engine; ``laps`` tells the pause's phases apart."""

    def __init__(self, engine: Engine, preparation: Preparation, report: SwitchReport, laps: Laps) -> None:
        self.engine, self.target, self.report = engine, report.target, report
        self.preparation, self.laps = preparation, laps
        self._held: Held | None = None
        self._new: Live | None = None
        self._carrier: Carrier | None = None
        self._staged = False

    def run(self) -> Live:
        """Carries it out.

        Raises:
            SwitchFailed: Some rank failed; all are in the old layout again.
            RankLost: Some rank is gone.
        """
        try:
            self._phase("drain", self._drain)
            with PeakMemory() as memory:
                self._phase("stage", self._stage)
                self._phase("free", self._free)
                carrier = self._phase("build", self._build)
                for part in carrier.parts:
                    self._phase("exchange", partial(carrier.move, part))
                    carrier.arrived(part)
                self._phase("load", partial(self._load, carrier))
            self.report.host_peak_bytes = memory.growth_bytes
            self.laps.end("load")
            assert self._new is not None
            return self._new
        except _Failed as failed:
            reason = self._back(failed)
        raise SwitchFailed(reason)

    def _phase(self, name: str, work: Callable[[], T]) -> T:
        engine = self.engine
        result: T | None = None
        failure: Failure | None = None
        try:
            engine.fault(name)
            result = work()
            engine.recovery.finish_device_work()
        except Exception as error:
            log_traceback(error, engine.rank)
            failure = describe(error, engine.rank)
            if name != "drain":
                engine.recovery.announce()
                self._let_go()
        failures = engine.agreement.agree(f"switch: {name}", failure)
        self.laps.end(name)
        if failures:
            raise _Failed(name, failures)
        return result  # type: ignore[return-value]

    def _let_go(self) -> None:
        """Closes this rank's connections, so that nobody waits for it in a collective of a layout."""
        engine = self.engine
        if self._held is None and engine.live is not None:
            self._held = hold_after_failure(engine.assembler, engine.live, engine.live.optimizer.scalars())
        engine.groups.abort()  # NCCL may wait for all ranks to end a group that was not aborted
        if self._carrier is not None:
            self._carrier.let_go()
        if self._new is not None:
            self._new.close()
            self._new = None
        self.preparation.drop()
        engine.take_down()

    # -- phases ------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        self.preparation.wait()
        failure = self.preparation.failure
        if failure is not None:
            raise MemoryError(failure.reason) if failure.kind == MEMORY else RuntimeError(failure.reason)

    def _stage(self) -> None:
        engine = self.engine
        assert engine.live is not None
        room = engine.has_room(self.target.layout)
        scalars, all_have_room = engine.assembler.gather_notes(engine.live, room)
        self._held = hold(engine.assembler, engine.live, scalars, on_host=not room)
        self._staged = not all_have_room

    def _free(self) -> None:
        engine = self.engine
        assert engine.live is not None
        engine.live.close()
        engine.live = None
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def _build(self) -> Carrier:
        engine, preparation = self.engine, self.preparation
        assert preparation.prepared is not None and preparation.plan is not None and self._held is not None
        with_state = bool(self._held.scalars) and not engine.one_by_one
        self._new = engine.assembler.materialise(preparation.prepared, with_state)
        preparation.prepared = None  # it is live now
        self._carrier = Carrier(
            engine.assembler, self._held, self._new, preparation.plan, engine.one_by_one, self._staged
        )
        self._carrier.tamper = engine.tamper
        return self._carrier

    def _load(self, carrier: Carrier) -> None:
        engine, held, new = self.engine, self._held, self._new
        assert held is not None and new is not None
        engine.assembler.settle(new, held.scalars)
        self.report.state_bytes = carrier.state_bytes
        self.report.bytes_received = moved = carrier.bytes_received
        bound = engine.assembler.state_bytes(self.preparation.missing, bool(held.scalars))
        counts = torch.tensor([moved, bound], dtype=torch.int64, device=engine.device)
        torch.distributed.all_reduce(counts, group=new.groups.world)
        self.report.bytes_moved, self.report.bytes_lower_bound = counts.tolist()

    # -- the way back ------------------------------------------------------------------------------------------

    def _back(self, failed: _Failed) -> str:
        """Takes the old layout up again, on all ranks. Returns the reason in one line."""
        engine = self.engine
        first = causes(failed.failures)[0]
        reason = f"rank {first.rank} failed in phase '{failed.phase}' of the switch to {self.target}: {first.reason}"
        self.preparation.drop()
        engine.recovery.reset()
        if failed.phase == "drain":  # whose groups some ranks may have made, and others not
            engine.groups.end_all_but([engine.layout])
        else:  # somebody has let go of the groups: all rebuild the old layout
            self._let_go()
            engine.recovery.take_up(self._restore)
        return reason

    def _restore(self) -> Live:
        engine, held = self.engine, self._held
        assert held is not None
        groups = engine.groups.get(engine.layout)
        if self._carrier is not None:
            return self._carrier.take_back(groups)
        return restore(engine.assembler, groups, held)
