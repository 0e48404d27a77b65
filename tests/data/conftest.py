from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest


def _children() -> set[int]:
    children = set()
    for process in psutil.Process().children(recursive=True):
        # Python itself keeps its tracker for good once anything was spawned.
        with suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(process.cmdline()):
                children.add(process.pid)
    return children


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """Ids of the processes under this one, now."""
    return _children


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    before = _children()
    yield
    assert _children() <= before
