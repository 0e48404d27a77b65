from __future__ import annotations

from collections.abc import Iterator

import pytest
from world import World


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process, for this one and its children: several ranks run on one machine."""
    environment = pytest.MonkeyPatch()
    environment.setenv("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once
    config.add_cleanup(environment.undo)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four ranks that live as long as the test session, and start with the first test that runs something."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def nothing_left_on_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the world: no engine is alive, no group, and the environment is as before."""
    yield
    if "world" in request.fixturenames:
        problems = request.getfixturevalue("world").problems()
        assert not problems, "\n".join(problems)
