"""Policies to compare with: they keep the layout, and choose the batch by rule or not at all."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from copus_lightning.core.decision import (
    Decision,
    Observation,
    Policy,
    check_batch_sizes,
    check_max_batch_growth,
    check_positive,
    largest_allowed_batch,
)
from copus_lightning.core.goodput import DEFAULT_COEFFICIENT
from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.profile import Profile


class _BatchOnly(Policy):
    """Chooses a global batch in the present layout; the micro-batch follows.

    With a profile, the micro-batch of the best throughput. Without, the largest that divides, up to the
    largest that this run has used, so that memory holds.
    """

    def __init__(self, profile: Profile | None) -> None:
        self.profile = profile
        self._micro_batch_size_limit = 0
        self._refused: list[tuple[Layout, int]] = []

    def observe(self, configuration: Configuration, step_seconds: float) -> None:
        self._micro_batch_size_limit = max(self._micro_batch_size_limit, configuration.micro_batch_size)
        if self.profile is not None:
            self.profile.observe(configuration, step_seconds)

    def failed(self, configuration: Configuration, reason: str) -> None:
        pair = configuration.layout, configuration.micro_batch_size
        self._refused = [*(refused for refused in self._refused if refused != pair), pair]
        if self.profile is not None:
            self.profile.mark_infeasible(*pair, reason)

    def throughput(self, configuration: Configuration) -> float | None:
        measured = configuration.layout, configuration.micro_batch_size
        if self.profile is None or not self.profile.is_measured(*measured):
            return None
        return self.profile.throughput(configuration)

    def state_dict(self) -> dict[str, Any]:
        return {
            "micro_batch_size_limit": self._micro_batch_size_limit,
            "refused": [[str(layout), micro] for layout, micro in self._refused],
            "profile": None if self.profile is None else self.profile.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._micro_batch_size_limit = int(state["micro_batch_size_limit"])
        self._refused = [(Layout.parse(layout), int(micro)) for layout, micro in state["refused"]]
        if self.profile is not None and state["profile"] is not None:
            self.profile.load_state_dict(state["profile"])

    def _at_batch(self, now: Configuration, global_batch_size: int) -> Configuration | None:
        """The present layout at another global batch, None if no micro-batch is left for it."""
        if global_batch_size % now.layout.data:
            return None
        if self.profile is not None:
            profile = self.profile
            measured = [c for c in profile.configurations([global_batch_size]) if c.layout == now.layout]
            if measured:
                return max(measured, key=lambda c: (profile.throughput(c), -c.micro_batch_size))
        limit = max(self._micro_batch_size_limit, now.micro_batch_size)
        for micro in range(limit, 0, -1):
            divides = global_batch_size % (now.layout.data * micro) == 0
            if divides and (now.layout, micro) not in self._refused:
                return Configuration(now.layout, global_batch_size, micro)
        return None


class CriticalBatch(_BatchOnly):
    """The batch follows the critical batch `c * phi` in a fixed layout (McCandlish et al. 2018).

    Of the listed sizes that the layout can run, the nearest in ratio, ties to the smaller.

    Args:
        profile: Chooses micro-batches if there is one.
        global_batch_sizes: The batches to choose among, samples.
        coefficient: c.
        max_batch_growth: As for `Copus`.

    Raises:
        ValueError: If a setting is not valid.
    """

    def __init__(
        self,
        profile: Profile | None,
        global_batch_sizes: Iterable[int],
        coefficient: float = DEFAULT_COEFFICIENT,
        max_batch_growth: float | None = 2.0,
    ) -> None:
        super().__init__(profile)
        self.global_batch_sizes = check_batch_sizes(global_batch_sizes)
        self.coefficient = check_positive("coefficient", coefficient)
        self.max_batch_growth = check_max_batch_growth(max_batch_growth)

    def decide(self, observation: Observation) -> Decision:
        now = observation.configuration
        if observation.noise_scale is None:
            return Decision(None, "stay: the noise scale is not known yet")
        critical = self.coefficient * observation.noise_scale
        reachable = [self._at_batch(now, size) for size in self.global_batch_sizes]
        choices = [choice for choice in reachable if choice is not None]
        sizes = [choice.global_batch_size for choice in choices]
        limit = largest_allowed_batch(now.global_batch_size, sizes, self.max_batch_growth)
        choices = [choice for choice in choices if choice.global_batch_size <= limit]
        if not choices:
            return Decision(None, f"stay: {now.layout} can run none of the global batches")
        best = min(choices, key=lambda choice: abs(math.log(choice.global_batch_size / critical)))
        if best.global_batch_size == now.global_batch_size:
            return Decision(None, f"stay: the critical batch is {critical:.4g}")
        return Decision(best, f"the critical batch is {critical:.4g}")


class Ramp(_BatchOnly):
    """A batch schedule over tokens in a fixed layout, in Megatron's notation.

    Args:
        schedule: `"0:768 250B:1536 1T:3072"`: from how many tokens on, which global batch. K, M, B, T stand
            for 1e3, 1e6, 1e9 and 1e12 tokens.
        profile: Chooses micro-batches if there is one.

    Raises:
        ValueError: If the schedule is not understood, does not begin at 0, or its tokens do not rise.
    """

    def __init__(self, schedule: str, profile: Profile | None = None) -> None:
        super().__init__(profile)
        self.stages: tuple[tuple[int, int], ...] = parse_ramp(schedule)

    def batch_at(self, tokens: int) -> int:
        """The global batch after so many tokens."""
        return [batch for start, batch in self.stages if start <= tokens][-1]

    def check(self, configuration: Configuration) -> None:
        """Refuse a layout that cannot run every batch of the schedule."""
        for _, batch in self.stages:
            try:
                Configuration(configuration.layout, batch, micro_batch_size=1)
            except ValueError as error:
                raise ValueError(f"ramp: {error}") from None

    def decide(self, observation: Observation) -> Decision:
        now, batch = observation.configuration, self.batch_at(observation.tokens)
        if batch == now.global_batch_size:
            return Decision(None, f"stay: the ramp is at {batch}")
        target = self._at_batch(now, batch)
        if target is None:
            return Decision(None, f"stay: the ramp is at {batch}, which {now.layout} cannot run")
        return Decision(target, f"the ramp is at {batch}")


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_ramp(schedule: str) -> tuple[tuple[int, int], ...]:
    """Read `"0:768 250B:1536 1T:3072"` as `((0, 768), (250_000_000_000, 1536), ...)`.

    Raises:
        ValueError: If it is written in another way, does not begin at 0, or its tokens do not rise.
    """
    stages: list[tuple[int, int]] = []
    for part in str(schedule).split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", part)
        if match is None:
            raise ValueError(f"ramp {part!r} is not understood: write it like '0:768 250B:1536 1T:3072'")
        amount, unit, batch = match.groups()
        stages.append((round(float(amount) * _UNITS[unit]), int(batch)))
    starts = [start for start, _ in stages]
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"ramp {schedule!r} must begin with '0:' and its tokens must rise")
    return tuple(stages)


class Static(Policy):
    """Stays, or goes once to a given configuration and stays there.

    Args:
        configuration: Where to be; None for wherever the run starts.
    """

    def __init__(self, configuration: Configuration | None = None) -> None:
        self.configuration = configuration
        self._refused = False

    def failed(self, configuration: Configuration, reason: str) -> None:
        self._refused = self._refused or configuration == self.configuration

    def decide(self, observation: Observation) -> Decision:
        if self.configuration in (None, observation.configuration):
            return Decision(None, "stay: the policy is static")
        if self._refused:
            return Decision(None, f"stay: {self.configuration} could not be entered")
        return Decision(self.configuration, "the configuration that was asked for")

    def state_dict(self) -> dict[str, Any]:
        return {"refused": self._refused}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._refused = bool(state["refused"])
