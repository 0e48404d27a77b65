"""What every policy is told and answers, and the checks that policies share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from copus_lightning.core.layout import Configuration


@dataclass(frozen=True)
class Observation:
    """What a policy is told.

    Args:
        configuration: What runs now.
        noise_scale: phi, samples; None while it is not known.
        tokens: Target tokens trained on so far.
        samples: Samples trained on so far.
        step: Optimizer steps made so far.
        seconds: Wall time of the run so far.
        switch_seconds: Expected cost of a layout switch.
        remaining_seconds: Until the run ends, None if not known.
        tokens_since_layout_switch: None if the layout never changed.
    """

    configuration: Configuration
    noise_scale: float | None
    tokens: int
    samples: int
    step: int
    seconds: float
    switch_seconds: float = 0.0
    remaining_seconds: float | None = None
    tokens_since_layout_switch: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A configuration with its predictions.

    Args:
        configuration: The configuration.
        throughput: Samples per second of the whole world, with the live correction.
        goodput: The policy's objective.
    """

    configuration: Configuration
    throughput: float
    goodput: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**self.configuration.to_dict(), "throughput": self.throughput, "goodput": self.goodput}


@dataclass(frozen=True)
class Decision:
    """Where to go, or to stay, and why.

    Args:
        configuration: The configuration to change to; None to stay.
        reason: One line for people.
        candidates: What was compared, best first, the present configuration among them; empty if nothing was.
    """

    configuration: Configuration | None
    reason: str
    candidates: tuple[Candidate, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, as written to events.jsonl."""
        return {
            "configuration": None if self.configuration is None else self.configuration.to_dict(),
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }


class Policy:
    """Chooses a configuration. Everything but `decide` may be left as it is."""

    def decide(self, observation: Observation) -> Decision:
        """The decision for this moment."""
        raise NotImplementedError

    def check(self, configuration: Configuration) -> None:
        """Refuse to start in a configuration that the policy could not work from.

        Raises:
            ValueError: One line naming the fix.
        """

    def observe(self, configuration: Configuration, step_seconds: float) -> None:
        """Learn from the wall time of a training step."""

    def failed(self, configuration: Configuration, reason: str) -> None:
        """Learn that a configuration cannot run here, so as not to choose it again."""

    def throughput(self, configuration: Configuration) -> float | None:
        """Predicted samples per second, None if the policy has no prediction."""
        return None

    def switch_seconds(self) -> float | None:
        """Cost of a layout switch as measured before this run, None if it was not."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What was learned, in plain JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""


def check_batch_sizes(global_batch_sizes: Iterable[int]) -> tuple[int, ...]:
    """Sorted, without repeats.

    Raises:
        ValueError: If there are none, or one is not a whole number of at least 1.
    """
    sizes = tuple(global_batch_sizes)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            f"global_batch_sizes must list whole numbers of samples, at least 1, got {list(sizes)}"
        )
    return tuple(sorted(set(sizes)))


def check_positive(key: str, value: float) -> float:
    """`value` itself.

    Raises:
        ValueError: If it is not a positive finite number.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {value!r}")
    return value


def check_max_batch_growth(value: float | None) -> float | None:
    """`value` itself.

    Raises:
        ValueError: If it is neither None nor a factor above 1.
    """
    if value is not None and not value > 1:
        raise ValueError(f"max_batch_growth must be a factor above 1, or none for no cap, got {value!r}")
    return value


def largest_allowed_batch(present: int, sizes: Iterable[int], max_growth: float | None) -> float:
    """Largest global batch that a decision may go to.

    `present * max_growth`, and always the next size of the list: where the list is sparser than the cap, it
    is climbed one size at a time, since a literal cap would hold the run at its first batch for ever.
    """
    if max_growth is None:
        return math.inf
    larger = [size for size in sizes if size > present]
    return max(present * max_growth, min(larger, default=0))
