"""Step time of a layout and micro-batch: fitted over the accumulation, and how far a run is off the fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from copus_lightning.core.layout import Layout

Pair = tuple[Layout, int]  # layout and micro-batch size: what has a step-time fit of its own


@dataclass(frozen=True)
class StepTimeFit:
    """`t(n) = alpha + n * beta` for n micro-batches per optimizer step and data rank.

    Args:
        alpha_seconds: Paid once per step: gradient reduction, optimizer, pipeline fill and drain (the fill of
            a 1F1B pipeline of p stages is `(p - 1) * beta`). Never negative.
        beta_seconds: Paid per micro-batch. Never negative.
        left_out_error: How far the fit can be trusted: each measured accumulation is predicted from a fit of
            the others, and this is the largest `|predicted - measured| / measured`, so one bad point cannot
            hide among good ones. None with fewer than three points: two always fit.
    """

    alpha_seconds: float
    beta_seconds: float
    left_out_error: float | None = None

    def step_seconds(self, accumulation: int) -> float:
        """Fitted seconds of one optimizer step with `accumulation` micro-batches."""
        return self.alpha_seconds + accumulation * self.beta_seconds


def fit_step_time(points: Sequence[tuple[int, float]]) -> StepTimeFit:
    """Fit the step time to measured `(accumulation, step_seconds)` points.

    Minimises the sum of squared *relative* errors, `sum ((alpha + n * beta - t) / t)^2`, subject to
    `alpha, beta >= 0`: throughput ratios decide, so a percent counts the same at every accumulation. The fit
    is used at measured points too, and does not pass through them: it averages the noise of single points.

    With one accumulation alone, alpha is taken as 0: throughput is then constant in the accumulation, which
    promises nothing that was not measured.

    Args:
        points: At least one; accumulations differ, seconds are positive.

    Returns:
        The fit, with its error on left-out points from three points on.
    """
    assert points and len({n for n, _ in points}) == len(points) and all(t > 0 for _, t in points)
    alpha, beta = _constrained_line(points)
    error = None
    if len(points) >= 3:
        error = 0.0
        for left_out, (n, seconds) in enumerate(points):
            rest_alpha, rest_beta = _constrained_line([*points[:left_out], *points[left_out + 1 :]])
            error = max(error, abs(rest_alpha + n * rest_beta - seconds) / seconds)
    return StepTimeFit(alpha, beta, error)


def _constrained_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Alpha and beta, both non-negative, of the least sum of squared relative errors."""
    if len(points) == 1:
        ((n, seconds),) = points
        return 0.0, seconds / n
    weights = [1 / seconds**2 for _, seconds in points]
    total = math.fsum(weights)
    mean_n = math.fsum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = math.fsum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    # Centred, so that near-parallel columns (large accumulations) lose no digits.
    beta = math.fsum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True))
    beta /= math.fsum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    alpha = mean_t - beta * mean_n
    if beta < 0:  # slower at a smaller accumulation: noise; the best flat line
        return mean_t, 0.0
    if alpha < 0:  # the best line through the origin
        numerator = math.fsum(w * n * t for w, (n, t) in zip(weights, points, strict=True))
        return 0.0, numerator / math.fsum(w * n * n for w, (n, _) in zip(weights, points, strict=True))
    return alpha, beta


class LiveCorrection:
    """Ratio of observed to fitted step time, per layout and micro-batch.

    The ratio is an exponential average of logarithms, `exp(sum_i w_i log r_i / sum_i w_i)` with `w` halving
    every `half_life_steps`: one hiccup then does not outweigh many steps, as in the median that was measured.

    A pair that never ran here has no ratio of its own: it is scaled by that of the pair that runs now, since what
    slows that one at present (a busy machine, the data loader) would slow any other too. Older ratios say nothing
    of the present: with their mean, a machine that was busy while it was profiled would make the present pair look
    better than all that it is compared with.

    Args:
        half_life_steps: Observed steps of a pair after which one of its steps counts half.
    """

    def __init__(self, half_life_steps: float = 10.0) -> None:
        if not half_life_steps > 0:
            raise ValueError(f"half_life_steps must be positive, got {half_life_steps!r}")
        self.half_life_steps = half_life_steps
        # Decayed sum of log ratios, decayed number of them; the pair that ran last comes last.
        self._sums: dict[Pair, tuple[float, float]] = {}

    def observe(self, pair: Pair, ratio: float) -> None:
        """Take in observed over fitted seconds of one step; both positive."""
        decay = 0.5 ** (1 / self.half_life_steps)
        log_sum, weight = self._sums.pop(pair, (0.0, 0.0))
        self._sums[pair] = (log_sum * decay + math.log(ratio), weight * decay + 1.0)

    def ratio(self, pair: Pair) -> float:
        """The factor on the fitted step time of `pair`; 1 before anything was observed."""
        if not self._sums:
            return 1.0
        log_sum, weight = self._sums.get(pair) or self._sums[next(reversed(self._sums))]
        return math.exp(log_sum / weight)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "ratios": [
                {"layout": str(layout), "micro_batch_size": micro, "log_sum": log_sum, "weight": weight}
                for (layout, micro), (log_sum, weight) in self._sums.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._sums = {
            (Layout.parse(entry["layout"]), int(entry["micro_batch_size"])): (
                float(entry["log_sum"]),
                float(entry["weight"]),
            )
            for entry in state["ratios"]
        }
