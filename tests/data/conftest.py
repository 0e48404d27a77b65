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


@pytest.fixture(autouse=True)
def children() -> Iterator[Callable[[], set[int]]]:
    """Ids of the processes that began under this one since the test did; none may be left at its end."""
    before = _children()
    yield lambda: _children() - before
    assert not _children() - before
