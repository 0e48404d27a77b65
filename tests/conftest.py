from __future__ import annotations

from collections.abc import Iterator

import pytest
from world import World


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
