"""A rank hears that another one has failed, though the collective in which it waits does not notice."""

from __future__ import annotations

import threading
from functools import partial

import torch.distributed as dist
from world import World

from copus_lightning.engine.agreement import Agreement
from copus_lightning.engine.failures import Failure
from copus_lightning.engine.watch import Watch

PATIENCE = 20.0


def one_fails(failing: int) -> tuple[bool, list[str], bool]:
    """Whether this rank was freed, what all agreed on, and whether it was freed once more later on."""
    rank = dist.get_rank()
    agreement = Agreement(PATIENCE)
    calls: list[int] = []
    freed = threading.Event()

    def abort() -> None:
        calls.append(rank)
        freed.set()

    watch = Watch(agreement, abort, poll_seconds=0.02)
    try:
        assert agreement.agree("before", None) == []
        failure = None
        if rank == failing:
            failure = Failure(rank, "error", "injected")
            agreement.announce()
        heard = freed.wait(PATIENCE)  # stands for a collective that waits for the failing rank
        reasons = [f.reason for f in agreement.agree("step", failure)]
        assert agreement.agree("after", None) == []
        dist.barrier()
        return heard, reasons, len(calls) > 1
    finally:
        watch.close()
        agreement.close()


def test_those_who_wait_for_a_failed_rank_are_freed_once(world: World) -> None:
    for heard, reasons, again in world.run(one_fails, 2):
        assert heard and reasons == ["injected"] and not again


def one_is_a_step_behind() -> tuple[bool, bool]:
    """Whether rank 0 hears of a failure in a step before it is in that step, and then."""
    agreement = Agreement(PATIENCE)
    heard = []
    if dist.get_rank() == 1:
        agreement.progress = 1
        agreement.announce()
    dist.barrier()
    for _ in range(2):
        calls: list[int] = []
        agreement.if_announced(partial(calls.append, 1))
        heard.append(bool(calls))
        agreement.progress = 1
    agreement.agree("step", None)
    agreement.close()
    return heard[0], heard[1]


def test_a_failure_reaches_a_rank_that_is_a_step_behind_once_it_is_there(world: World) -> None:
    assert world.run(one_is_a_step_behind, ranks=2)[0] == (False, True)


def nobody_fails() -> tuple[int, int]:
    """How often this rank was freed, and threads left over."""
    before = threading.active_count()
    agreement = Agreement(PATIENCE)
    calls: list[int] = []
    watch = Watch(agreement, lambda: calls.append(1), poll_seconds=0.01)
    for index in range(20):
        assert agreement.agree(f"phase {index}", None) == []
    watch.close()
    agreement.close()
    return len(calls), threading.active_count() - before


def test_without_a_failure_nothing_is_ended_and_no_thread_stays(world: World) -> None:
    assert world.run(nobody_fails) == [(0, 0)] * 4
