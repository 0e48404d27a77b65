"""A plain script started with `python script.py`, one of whose ranks is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).with_name("losing_script.py")
LIMIT_SECONDS = 120.0
"""Two interpreters that import everything on two busy cores, the time-out of 20 s, and the notice."""


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Both at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    started = {
        face: subprocess.Popen(
            [sys.executable, str(SCRIPT), face], env=environment, stderr=subprocess.PIPE, text=True
        )
        for face in ("fabric", "trainer")
    }
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def ranks_of(process: subprocess.Popen[str]) -> set[psutil.Process]:
    """The ranks that the first one has started, once they are there or it has ended."""
    while process.poll() is None:
        if found := psutil.Process(process.pid).children(recursive=True):
            return set(found)
        time.sleep(0.1)
    return set()


@pytest.mark.parametrize("face", ["fabric", "trainer"])
def test_the_first_rank_ends_with_an_error_that_names_the_lost_one(
    runs: dict[str, subprocess.Popen[str]], face: str
) -> None:
    process = runs[face]
    ranks = ranks_of(process)
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1, errors
    last = errors.splitlines()[-1]
    assert "rank 1 stopped answering in phase" in last and "(noticed by rank 0)" in last, errors
    assert not any(rank.is_running() for rank in ranks)


UNAWARE = """
import subprocess, sys, time
from copus_lightning.strategies import launchers

launchers.NOTICE_SECONDS = 0.1
ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in ("import time; time.sleep(99)", "1 / 0")]
print(ranks[0].pid, flush=True)
launchers.RankWatch(ranks, first=4)
time.sleep(99)
"""


def test_a_first_rank_that_does_not_come_to_know_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", UNAWARE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "copus: rank 6 ended with an error" in done.stderr.splitlines()[-1]
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie"
