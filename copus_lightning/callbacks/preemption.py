"""Pre-emption: a signal that asks the run to save and leave, answered by all ranks after the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from copus_lightning.strategies.session import Session


class Preemption:
    """Catches SIGTERM while it is entered, and tells all ranks once one of them has got it.

    A cluster warns a job that it takes away with SIGTERM, often one rank of it alone:

        with Preemption(fabric.strategy.session) as preemption:
            for batch in loader:
                ...                              # a step
                if preemption.requested():       # the same on all ranks
                    fabric.save(path, state)
                    break

    Args:
        session: Of the strategy. It need not have an engine before :meth:`requested` is called.
        number: Of the signal.

    Attributes:
        received: Whether this rank has got the signal.
    """

    def __init__(self, session: Session, number: int = signal.SIGTERM) -> None:
        self.session, self.number = session, number
        self.received = False
        self._before: Callable[[int, FrameType | None], Any] | int | None = None

    def __enter__(self) -> Preemption:
        self._before = signal.signal(self.number, self._take_note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(self.number, self._before if self._before is not None else signal.SIG_DFL)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def requested(self) -> bool:
        """Whether any rank has got the signal. Collective; a few bytes over a channel of its own.

        Raises:
            RankLost: A rank is gone.
        """
        # The engine loads DeepSpeed, which a script may not have done yet when it imports this.
        from copus_lightning.engine.failures import Failure

        engine = self.session.live
        notice = Failure(engine.rank, "signal", signal.Signals(self.number).name) if self.received else None
        return bool(engine.agreement.agree("the step's end", notice))
