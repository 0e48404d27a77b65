"""The helper that runs tests on several ranks: what it promises when ranks fail, die or hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from world import RemoteTraceback, World, WorldError


def rank_sum(factor: int) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return factor * dist.get_rank(), dist.get_world_size(), total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like it")
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError("everywhere")


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_here() -> None:
    time.sleep(100)


def leave_a_group() -> None:
    dist.new_group([0, 1])
    os.environ["LEFT_BEHIND"] = "1"


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    pair = World(2)
    yield pair
    pair.close()


def test_results_come_by_rank_and_smaller_worlds_are_possible(pair: World) -> None:
    assert pair.run(rank_sum, 10) == [(0, 2, 1.0), (10, 2, 1.0)]
    assert pair.run(rank_sum, 10, ranks=1) == [(0, 1, 0.0)]
    assert pair.run(rank_sum, 3) == [(0, 2, 1.0), (3, 2, 1.0)]


def test_errors_come_with_their_type_and_remote_traceback(pair: World) -> None:
    with pytest.raises(KeyError, match="everywhere") as caught:
        pair.run(fail_everywhere)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "fail_everywhere" in str(caught.value.__cause__)
    ids = pair.process_ids
    assert pair.run(rank_sum, 1) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert pair.process_ids == ids, "all ranks answered: the processes live on"


def test_what_is_left_behind_is_named_once(pair: World) -> None:
    pair.run(leave_a_group)
    problems = pair.problems()
    assert [line for line in problems if "1 process groups" in line]
    assert [line for line in problems if "LEFT_BEHIND" in line]
    assert pair.problems() == []


def test_a_rank_that_waits_for_a_failed_one_does_not_hang_the_test(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("world.GRACE_SECONDS", 1.0)
    with pytest.raises(ValueError, match="rank 1 does not like it"):
        pair.run(fail_on, 1)
    assert not pair.alive
    assert pair.run(rank_sum, 1) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_rank_that_exits_is_named(pair: World) -> None:
    with pytest.raises(WorldError, match=r"rank 1 exited with code 7 in test_world\.exit_on"):
        pair.run(exit_on, 1)
    assert not pair.alive


def test_a_hang_ends_with_the_stacks(pair: World) -> None:
    ids = []
    pair.run(rank_sum, 1)
    ids = pair.process_ids
    with pytest.raises(WorldError, match=r"longer than 1 s[\s\S]*hang_here"):
        pair.run(hang_here, timeout=1)
    assert not any(psutil.pid_exists(i) for i in ids)


def test_the_processes_die_with_the_test_process() -> None:
    script = (
        "import os, signal\nfrom world import World\n"
        "if __name__ == '__main__':\n"
        "    world = World(2, preload=())\n"
        "    world.run(os.getpid)\n"
        "    print(*world.process_ids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=here, capture_output=True, text=True, timeout=120
    )
    ids = [int(word) for word in done.stdout.split()]
    assert len(ids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(i) for i in ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(i) for i in ids)
