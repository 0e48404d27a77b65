"""A rank that is killed ends the run on all others, within the time-out, with an error that names it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from . import dying_ranks

SCENARIOS = {
    "micro-batch": 3,  # while training
    "groups": 1,
    "prepare": 2,
    "drain": 3,
    "stage": 1,
    "free": 2,
    "build": 3,
    "exchange": 1,
    "load": 0,
    "save: describe": 2,
    "save: between": 0,
}
"""Where the rank dies, and which."""

LIMIT_SECONDS = 30.0
"""Longest end of a survivor: the time-out of 8 s, a roll-call of 5 s, and slow machines."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """All scenarios, in processes of their own."""
    return dying_ranks.outcomes(SCENARIOS)


@pytest.mark.parametrize("phase", SCENARIOS)
def test_survivors_end_and_name_the_rank(outcomes: dict[str, Any], phase: str) -> None:
    outcome = outcomes[phase]
    victim = SCENARIOS[phase]
    assert outcome["hung"] == []
    assert outcome["exit_codes"] == [-signal.SIGKILL if rank == victim else 0 for rank in range(4)]
    assert sorted(outcome["reports"]) == [r for r in range(4) if r != victim]
    for report in outcome["reports"].values():
        assert report["error"] == "RankLost", report
        assert f"rank {victim} stopped answering" in report["reason"] and "\n" not in report["reason"]
        assert report["seconds"] < LIMIT_SECONDS


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(outcomes: dict[str, Any]) -> None:
    found = {phase: outcome["checkpoint"] for phase, outcome in outcomes.items() if phase.startswith("save")}
    assert found == {"save: describe": 1, "save: between": 1}
