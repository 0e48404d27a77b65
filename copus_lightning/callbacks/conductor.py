"""What happens after each optimizer step, the same for Fabric and Trainer.

measure (engine) → estimate and decide (core, on rank 0) → broadcast → switch (strategy) → record and log.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from copus_lightning.core.controller import Controller
from copus_lightning.core.layout import Configuration
from copus_lightning.core.records import RunRecorder
from copus_lightning.engine.switching import OVERLAPPED, SwitchReport
from copus_lightning.strategies.session import Session

Row = dict[str, Any]


class Conductor:
    """Runs a controller over a session.

    Args:
        session: The strategy's.
        controller: The same on every rank, fed with the same numbers but for seconds; rank 0's decisions count.
        broadcast: Sends an object of rank 0 to all ranks.
        recorder: On rank 0, or None.
        measure_cost_fraction: Largest share of the step time, on average, that measuring the noise may cost.
    """

    def __init__(
        self,
        session: Session,
        controller: Controller,
        broadcast: Callable[[Any], Any],
        recorder: RunRecorder | None,
        measure_cost_fraction: float = 0.01,
    ) -> None:
        self.session, self.controller = session, controller
        self.broadcast, self.recorder = broadcast, recorder
        self.measure_cost_fraction = measure_cost_fraction
        self.remaining_seconds: float | None = None
        self.measure_every = 1
        self._since_measured = 0
        self._probe_costs: list[float] = []
        self._last_end: float | None = None
        self._booked = 0.0
        self._warned = False
        self._switch_at = 0  # of the pending switch
        self._prepare_seconds = 0.0
        self._unfinished: dict[str, Any] | None = None
        session.live.measure_next = True
        session.book = self.book
        session.switch_for_script = self.perform
        session.learning_rate_factor = controller.learning_rate_factor
        if session.configuration is not None and recorder is not None:
            recorder.event("start", **session.configuration.to_dict(), step=controller.step)

    # -- time --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def account(self, kind: str) -> Iterator[None]:
        """Books the block's wall time under ``kind`` and leaves it out of the step time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.book(kind, time.perf_counter() - started)

    def book(self, kind: str, seconds: float) -> None:
        """Books seconds that passed since the last step under ``kind``."""
        self.controller.add_seconds(kind, seconds)
        self._booked += seconds

    def _step_seconds(self) -> float:
        now = time.perf_counter()
        wall = self.session.step_seconds if self._last_end is None else now - self._last_end - self._booked
        self._last_end, self._booked = now, 0.0
        return max(wall, 1e-9)

    # -- one step ----------------------------------------------------------------------------------------------

    def after_step(self, learning_rate: float) -> Row:
        """Takes in the step that has just ended, decides and switches if it is time.

        Args:
            learning_rate: Of the user's first param group, without the factor for the batch.

        Returns:
            The step's row of ``metrics.csv``.
        """
        session, controller = self.session, self.controller
        assert session.outcome is not None and session.loss is not None and session.configuration is not None
        outcome = session.outcome
        step_seconds = self._step_seconds()
        self._take_in_reductions()
        row = controller.observe_step(
            configuration=session.live.configuration,
            n_samples=outcome.n_samples,
            n_target_tokens=outcome.n_target_tokens,
            step_seconds=step_seconds,
            loss=float(session.loss),
            norms=outcome.norms,
        )
        row["grad_norm"] = outcome.gradient_norm
        row["learning_rate"] = learning_rate * session.learning_rate_factor
        if self.recorder is not None:
            self.recorder.step(row)
            if not outcome.applied:
                self.recorder.event("skipped_step", step=controller.step, reason="a gradient is not finite")
        self._plan_measurement(outcome.norms is not None, step_seconds)
        self._finish_switch_event(step_seconds)
        if controller.pending is not None:
            if controller.step >= self._switch_at:
                self.switch(controller.pending)
        elif controller.due():
            self._decide(step_seconds)
        session.learning_rate_factor = controller.learning_rate_factor
        return row

    def _take_in_reductions(self) -> None:
        """Micro-batches that ran out of memory in the last step: the engine has halved them already."""
        for failure in self.session.take_reductions():
            self.controller.failed(failure.configuration, failure.reason)
            self.controller.applied(failure.replacement)
            self._event(
                "out_of_memory",
                configuration=failure.configuration.to_dict(),
                replacement=failure.replacement.to_dict(),
                reason=failure.reason,
            )

    def _plan_measurement(self, measured: bool, step_seconds: float) -> None:
        """Measures every k-th step, k such that the cost stays below its share. All ranks use rank 0's k."""
        configuration = self.session.live.configuration
        if measured:
            self._since_measured = 0
            # The first measurement after a change pays for first allocations; the smallest of three is the cost.
            self._probe_costs = [*self._probe_costs[-2:], self.session.live.probe_seconds]
            budget = self.measure_cost_fraction * step_seconds
            wanted = max(1, math.ceil(min(self._probe_costs) / budget)) if budget > 0 else 1
            self.measure_every = self.broadcast(wanted)
        else:
            self._since_measured += 1
        if configuration.layout.data * configuration.accumulation < 2:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{configuration} has one micro-batch per step: the noise scale cannot be measured there, "
                    "the last known value is kept (use a smaller micro-batch to measure it)",
                    stacklevel=2,
                )
            self.session.live.measure_next = False
        else:
            self.session.live.measure_next = self._since_measured + 1 >= self.measure_every

    def _decide(self, step_seconds: float) -> None:
        decision = self.controller.decide(self.remaining_seconds)
        wanted = decision.configuration.to_dict() if decision.configuration is not None else None
        wait = max(1, math.ceil(self._prepare_seconds / step_seconds))
        wanted, wait = self.broadcast((wanted, wait))  # rank 0's word
        target = Configuration.from_dict(wanted) if wanted is not None else None
        self.controller.pending = target
        self._event("decision", **decision.to_dict(), noise_scale=self.controller.noise_scale)
        if target is None:
            return
        if target.layout == self.session.live.layout:
            self.switch(target)
            return
        # What needs no old state is prepared in a helper thread; the switch follows some steps later.
        self.session.live.prepare(target)
        self._switch_at = self.controller.step + wait

    def switch(self, target: Configuration) -> None:
        """Switches; a switch that fails leaves the run where it was."""
        from copus_lightning.engine.engine import SwitchFailed

        with contextlib.suppress(SwitchFailed):
            self.perform(target)

    def perform(self, target: Configuration) -> SwitchReport:
        """Switches, books what it cost and records it.

        Raises:
            SwitchFailed: It failed; that is booked and recorded, too.
        """
        from copus_lightning.engine.engine import SwitchFailed

        self._finish_switch_event(None)  # of a switch that no step has followed
        before = self.session.live.configuration
        started = time.perf_counter()
        try:
            report = self.session.switch(target)
        except SwitchFailed as failure:
            seconds = time.perf_counter() - started
            self.controller.failed(target, failure.reason, seconds)
            self._booked += seconds
            self._event("switch_failed", **_from_to(before, target), reason=failure.reason)
            raise
        seconds = time.perf_counter() - started
        self.controller.applied(target, seconds)
        self.session.learning_rate_factor = self.controller.learning_rate_factor
        self._booked += seconds
        self._since_measured, self._probe_costs = 0, []
        if report.layout_changed:
            self._prepare_seconds = sum(report.seconds.get(phase, 0.0) for phase in OVERLAPPED)
        event: dict[str, Any] = {
            **_from_to(before, target),
            "layout_changed": report.layout_changed,
            "seconds": dict(report.seconds),
            "total_seconds": report.total_seconds,
            "overlapped": report.overlapped,
            "bytes_moved": report.bytes_moved,
            "bytes_lower_bound": report.bytes_lower_bound,
            "host_peak_bytes": report.host_peak_bytes,
            "state_bytes": report.state_bytes,
            "step": self.controller.step,
            "tokens": self.controller.tokens,
        }
        if report.layout_changed:
            self._unfinished = event  # until the first step's time is known
        elif self.recorder is not None:
            self.recorder.event("switch", **event)
        return report

    def _finish_switch_event(self, first_step_seconds: float | None) -> None:
        event, self._unfinished = self._unfinished, None
        if event is None or self.recorder is None:
            return
        if first_step_seconds is not None:
            event["seconds"]["first_step"] = first_step_seconds
        self.recorder.event("switch", **event)

    def _event(self, kind: str, **fields: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, step=self.controller.step, tokens=self.controller.tokens, **fields)

    def record_validation(self, val_loss: float) -> None:
        """Records a validation loss, nats per target token."""
        self._event("validation", val_loss=val_loss, seconds=self.controller.seconds_total)

    def summary(self) -> Row:
        """The run so far in a few numbers."""
        self._finish_switch_event(None)
        return self.controller.summary()


def _from_to(before: Configuration, target: Configuration) -> Mapping[str, Any]:
    return {"from": before.to_dict(), "to": target.to_dict()}


def on_rank_zero(rank: int, directory: str | os.PathLike[str] | None) -> RunRecorder | None:
    """The recorder of rank 0; other ranks write nothing."""
    return RunRecorder(directory) if rank == 0 and directory is not None else None
