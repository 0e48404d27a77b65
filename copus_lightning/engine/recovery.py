"""How all ranks come back from a failure on any of them, in a step or in a switch.

1. The rank that failed announces it, which frees the others from the collectives of the layout.
2. Every rank holds its pieces of masters and moments, takes the layout down and comes to an agreement.
3. Once all know what happened, all take the layout up again from what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from copus_lightning.engine.carrying import hold_after_failure, restore
from copus_lightning.engine.failures import MEMORY, Failure, StepFailed, causes, describe
from copus_lightning.engine.watch import Watch

if TYPE_CHECKING:
    from copus_lightning.engine.assembly import Live
    from copus_lightning.engine.engine import Engine


class Recovery:
    """Of one engine.

    Args:
        engine: Whose layout it is; with its agreement and its groups made already.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._aborted = False
        on_device = engine.device.type == "cuda"
        self._watch = Watch(engine.agreement, self._on_failure_elsewhere) if on_device else None

    def announce(self) -> None:
        """To be called as soon as this rank has failed: frees it and the others from collectives of the layout."""
        self._engine.agreement.announce()
        self._engine.groups.abort()

    def _on_failure_elsewhere(self) -> None:
        self._aborted = True
        self._engine.groups.abort()

    def finish_device_work(self) -> None:
        """Waits until the device has done all that it was given.

        Raises:
            RuntimeError: Another rank has failed, and what this one waited for was ended.
        """
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        if self._aborted:
            raise RuntimeError("connection closed: another rank failed")

    def reset(self) -> None:
        """To be called once all ranks have agreed on a failure, before a layout is built again. Collective."""
        self._aborted = False
        # Groups are named after how many a rank has made, and one may have failed to make some.
        world = dist.distributed_c10d._world
        world.group_count = self._engine.agreement.largest(world.group_count)

    def take_up(self, work: Callable[[], Live]) -> None:
        """Builds the layout again that was alive before a failure. Collective.

        Raises:
            StepFailed: Some rank could not.
        """
        engine = self._engine
        failure = None
        try:
            engine.live = work()
        except Exception as error:
            failure = describe(error, engine.rank)
            self.announce()
            engine.take_down()
        failures = engine.agreement.agree("recovery", failure)
        if failures:
            first = causes(failures)[0]
            raise StepFailed(
                f"rank {first.rank} could not take {engine.configuration} up again after a failure: {first.reason}"
            )

    def undo_step(self, failure: Failure) -> str:
        """Brings all ranks back to the state before a step that failed, if memory is all that was missing.

        Args:
            failure: On this rank; it may be that another one failed.

        Returns:
            The reason in one line.

        Raises:
            StepFailed: A rank failed for another reason.
            RankLost: A rank is gone.
        """
        engine = self._engine
        live = engine.live
        assert live is not None
        self.announce()
        held = hold_after_failure(engine.assembler, live, live.optimizer.scalars())
        del live
        engine.take_down()
        failures = engine.agreement.agree("step", failure)
        first = causes(failures)[0]
        if first.kind != MEMORY:
            raise StepFailed(f"rank {first.rank} failed in the step: {first.reason}")
        self.reset()
        self.take_up(lambda: restore(engine.assembler, engine.groups.get(engine.layout), held))
        return f"rank {first.rank} ran out of memory in {engine.configuration}: {first.reason}"

    def close(self) -> None:
        """Ends the thread that listens for failures."""
        if self._watch is not None:
            self._watch.close()
