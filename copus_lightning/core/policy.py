"""Policies: from what a run observes to the configuration that it should be in.

| policy          | batch                         | layout | use                                       |
|-----------------|-------------------------------|--------|-------------------------------------------|
| `Copus`         | best predicted Goodput        | same   | the default                               |
| `CriticalBatch` | follows `c * phi`             | fixed  | baseline                                  |
| `Ramp`          | from a schedule over tokens   | fixed  | Megatron's `"0:768 250B:1536 1T:3072"`    |
| `Static`        | fixed                         | fixed  | baseline, or one move to a given place    |

`decide` is a pure function of the observation and of the profile as corrected so far: it reads no clock, and
what it needs to know of the past stands in the observation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from copus_lightning.core.baselines import CriticalBatch, Ramp, Static
from copus_lightning.core.decision import (
    Candidate,
    Decision,
    Observation,
    Policy,
    check_batch_sizes,
    check_max_batch_growth,
    check_positive,
    largest_allowed_batch,
)
from copus_lightning.core.goodput import DEFAULT_COEFFICIENT, OBJECTIVES
from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.profile import Profile

__all__ = ["Candidate", "Copus", "CriticalBatch", "Decision", "Observation", "Policy", "Ramp", "Static"]


class Copus(Policy):
    """Goes to the configuration of the best predicted Goodput (COPUS, arXiv 2604.26687).

    Candidates are the profile's feasible configurations at `global_batch_sizes` with two micro-batches per step
    or more (the noise scale cannot be measured with one); per layout and batch, the micro-batch with the best
    throughput. A change of batch or micro-batch alone rebuilds nothing, so it is
    made for any gain of at least `batch_threshold`. A layout change to Goodput `J1` must pass two tests:

        J1 >= (1 + threshold) * J0        the paper's hysteresis
        (J1 - J0) * H > J1 * tau          what is gained in H seconds pays for a switch of tau seconds

    `J0` is the present Goodput, or that of the best change in the present layout if there is one, since it
    costs nothing; `tau` is the expected cost of a switch, and `H` the shorter of `dwell_seconds` and the
    run's remaining time.

    Args:
        profile: Measured throughput; its live correction is fed by `observe`.
        global_batch_sizes: The batches to choose among, samples.
        objective: "goodput" or "lr_aware".
        critical_batch_coefficient: c, maps the noise scale to the critical batch.
        threshold: epsilon, least relative gain of a layout change. It must cover the profile's error.
        max_batch_growth: Largest factor by which one decision raises the batch, None for no cap; see
            `largest_allowed_batch`. There is no cap downwards.
        cooldown_tokens: No layout change for so many tokens after the last one, whether it worked or failed.
        dwell_seconds: How long the run expects to stay in a new layout; None for the rest of the run.
        allow_layout: False keeps the layout and chooses batch and micro-batch alone.
        batch_threshold: Least relative gain of a change of batch or micro-batch alone, against flutter.

    Raises:
        ValueError: If a setting is not valid, or a batch fits no measured configuration.
    """

    def __init__(
        self,
        profile: Profile,
        global_batch_sizes: Iterable[int],
        objective: str = "goodput",
        critical_batch_coefficient: float = DEFAULT_COEFFICIENT,
        threshold: float = 0.10,
        max_batch_growth: float | None = 2.0,
        cooldown_tokens: int = 0,
        dwell_seconds: float | None = None,
        allow_layout: bool = True,
        batch_threshold: float = 0.02,
    ) -> None:
        self.profile = profile
        self.global_batch_sizes = check_batch_sizes(global_batch_sizes)
        if objective not in OBJECTIVES:
            raise ValueError(f"objective={objective!r} is not known: choose among {', '.join(OBJECTIVES)}")
        self.objective = objective
        self.critical_batch_coefficient = check_positive(
            "critical_batch_coefficient", critical_batch_coefficient
        )
        for key, value in (("threshold", threshold), ("batch_threshold", batch_threshold)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{key} is a relative gain like 0.1, at least 0, got {value!r}")
        self.threshold, self.batch_threshold = threshold, batch_threshold
        self.max_batch_growth = check_max_batch_growth(max_batch_growth)
        if cooldown_tokens < 0:
            raise ValueError(f"cooldown_tokens must not be negative, got {cooldown_tokens!r}")
        self.cooldown_tokens = cooldown_tokens
        if dwell_seconds is not None and not dwell_seconds > 0:
            raise ValueError(f"dwell_seconds must be positive, or none, got {dwell_seconds!r}")
        self.dwell_seconds = dwell_seconds
        self.allow_layout = allow_layout
        units = sorted({layout.data * micro for layout, micro in profile.pairs()})
        for size in self.global_batch_sizes:
            if not any(size % unit == 0 for unit in units):
                raise ValueError(
                    f"global_batch_sizes: {size} fits no layout and micro-batch of {profile.source}: use"
                    f" multiples of one of {', '.join(map(str, units)) or 'none'}, or measure more with"
                    " `copus profile`"
                )

    def check(self, configuration: Configuration) -> None:
        """Refuse to start where the profile cannot tell the present Goodput."""
        if not self.profile.is_feasible(configuration):
            there = ", ".join(f"{layout} micro-batch {micro}" for layout, micro in self.profile.pairs())
            raise ValueError(
                f"{configuration} is not in {self.profile.source}, so its goodput is not known: start in one"
                f" of {there or 'none'}, or measure it with `copus profile`"
            )

    def observe(self, configuration: Configuration, step_seconds: float) -> None:
        self.profile.observe(configuration, step_seconds)

    def failed(self, configuration: Configuration, reason: str) -> None:
        self.profile.mark_infeasible(configuration.layout, configuration.micro_batch_size, reason)

    def throughput(self, configuration: Configuration) -> float | None:
        measured = configuration.layout, configuration.micro_batch_size
        return self.profile.throughput(configuration) if self.profile.is_measured(*measured) else None

    def switch_seconds(self) -> float | None:
        return self.profile.switch_seconds

    def state_dict(self) -> dict[str, Any]:
        return {"profile": self.profile.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.profile.load_state_dict(state["profile"])

    def candidate(self, configuration: Configuration, noise_scale: float) -> Candidate:
        """Predictions for one measured configuration."""
        throughput = self.profile.throughput(configuration)
        goodput = OBJECTIVES[self.objective](
            throughput, configuration.global_batch_size, noise_scale, self.critical_batch_coefficient
        )
        return Candidate(configuration, throughput, goodput)

    def decide(self, observation: Observation) -> Decision:
        now, noise_scale = observation.configuration, observation.noise_scale
        if noise_scale is None:
            return Decision(None, "stay: the noise scale is not known yet")
        if self.throughput(now) is None:
            return Decision(None, f"stay: {now} is not in the profile, so nothing can be compared with it")

        best: dict[tuple[Layout, int], Candidate] = {}
        for configuration in self.profile.configurations(self.global_batch_sizes):
            if configuration.layout.data * configuration.accumulation < 2:
                continue  # one micro-batch per step: the noise scale could not be measured there
            candidate = self.candidate(configuration, noise_scale)
            place = configuration.layout, configuration.global_batch_size
            if place not in best or candidate.throughput > best[place].throughput:
                best[place] = candidate
        present = self.candidate(now, noise_scale)
        # Ties go by configuration, so that every process would decide alike.
        candidates = sorted({present, *best.values()}, key=lambda c: (-c.goodput, c.configuration))

        limit = largest_allowed_batch(
            now.global_batch_size, (batch for _, batch in best), self.max_batch_growth
        )
        allowed = [c for c in candidates if c.configuration.global_batch_size <= limit]
        chosen = present
        stay = "no configuration is predicted to be better"
        for candidate in allowed:  # best first
            if candidate.configuration.layout == now.layout:
                if candidate.goodput >= (1 + self.batch_threshold) * present.goodput and candidate != present:
                    chosen = candidate
                break
        for candidate in allowed:
            if self.allow_layout and candidate.configuration.layout != now.layout:
                objection = self._objection(candidate, chosen, observation)
                if objection is None:
                    chosen = candidate
                elif candidate.goodput > chosen.goodput:
                    stay = objection
                break
        if chosen is present:
            return Decision(None, f"stay: {stay}", tuple(candidates))
        gain = chosen.goodput / present.goodput - 1
        return Decision(
            chosen.configuration,
            f"predicted {self.objective} {chosen.goodput:.4g}, now {present.goodput:.4g} ({gain:+.1%})",
            tuple(candidates),
        )

    def _objection(self, candidate: Candidate, base: Candidate, observation: Observation) -> str | None:
        """Why a layout change to `candidate` is not worth it against `base`, or None if it is."""
        gain = candidate.goodput - base.goodput
        to = candidate.configuration
        if candidate.goodput < (1 + self.threshold) * base.goodput:
            return f"{to} gains {gain / base.goodput:+.1%}, below the threshold of {self.threshold:.0%}"
        since = observation.tokens_since_layout_switch
        if since is not None and since < self.cooldown_tokens:
            return f"{to} waits for the cool-down: {since} of {self.cooldown_tokens} tokens have passed"
        horizons = [h for h in (self.dwell_seconds, observation.remaining_seconds) if h is not None]
        dwell_seconds = min(horizons, default=math.inf)
        cost = candidate.goodput * observation.switch_seconds
        if not gain * dwell_seconds > cost:
            return (
                f"{to} needs {cost / gain if gain else math.inf:.0f} s to win back a switch of"
                f" {observation.switch_seconds:.1f} s, and has {dwell_seconds:.0f} s"
            )
        return None
