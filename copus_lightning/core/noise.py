"""Gradient noise scale from squared gradient norms.

The probe measures `StepNorms`, `estimate` turns one step's norms into a `NoiseEstimate`, `NoiseScaleTracker`
smooths over steps. Symbols: `g_k` is the mean gradient of micro-batch k over its `b_k` target tokens,
`W = sum_k b_k`, and `mean g = sum_k b_k g_k / W` is the gradient of the step, before clipping and free of
any loss scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A trace can be below zero by the rounding of two sums of squares, relative to either. Sums kept in float32
# stay far below this; a wrong scale or a missing reduction goes far above it.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class StepNorms:
    """Squared gradient norms of one optimizer step, over the whole model and all data ranks.

    Args:
        weighted_micro_sq_norm_sum: `sum_k b_k |g_k|^2`, in tokens times squared gradient units.
        mean_sq_norm: `|mean g|^2`.
        n_micro_batches: M, micro-batches over all data ranks that have at least one target token: one whose
            labels are all masked adds nothing to either sum and must not be counted.
        n_target_tokens: `W = sum_k b_k`, target tokens of the global batch.
        n_samples: `B_g`, samples of the global batch.
    """

    weighted_micro_sq_norm_sum: float
    mean_sq_norm: float
    n_micro_batches: int
    n_target_tokens: int
    n_samples: int


@dataclass(frozen=True)
class NoiseEstimate:
    """One step's unbiased estimate of the two parts of the noise scale.

    Args:
        trace: `tr(Sigma)`, trace of the gradient covariance per *sample*.
        sq_norm: `|G|^2`, squared norm of the true gradient. Often negative by chance: smooth, never clamp.
        weight: M - 1. The relative spread of the trace falls like `1 / sqrt(M - 1)`: this is its precision.
        n_samples: Samples that the step consumed: how far the averages age.
    """

    trace: float
    sq_norm: float
    weight: float
    n_samples: int


def estimate(norms: StepNorms) -> NoiseEstimate | None:
    """Noise estimate of one step, for micro-batches of equal or unequal numbers of target tokens.

    Per token `tr = (sum_k b_k |g_k|^2 - W |mean g|^2) / (M - 1)` and `|G|^2 = |mean g|^2 - tr / W`
    (McCandlish et al. 2018, arXiv 1812.06162, app. A.1, weighted by tokens). The trace is handed on per
    sample: divided by the `W / B_g` tokens of a sample, so that the noise scale counts samples as the batch
    does.

    Returns:
        None if there are fewer than two micro-batches (nothing to compare), if a norm is not finite (the
        step was skipped), or if the trace is negative beyond rounding: no data can cause that, and it is
        warned about.
    """
    if norms.n_micro_batches < 2 or norms.n_target_tokens < 1 or norms.n_samples < 1:
        return None
    if not (math.isfinite(norms.weighted_micro_sq_norm_sum) and math.isfinite(norms.mean_sq_norm)):
        return None
    scatter = norms.weighted_micro_sq_norm_sum - norms.n_target_tokens * norms.mean_sq_norm
    if scatter < -_ROUNDING * norms.n_target_tokens * norms.mean_sq_norm:
        warnings.warn(
            f"negative gradient variance ({scatter:.4g} from {norms}): impossible for true norms, so the mean"
            " gradient's norm is too large or a micro-batch's too small; likely a factor of the accumulation"
            " count, the loss scale or the world size left in one of them, or a reduction that misses ranks"
            " or counts replicated parameters twice. The noise scale ignores this step.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    token_trace = scatter / (norms.n_micro_batches - 1)
    return NoiseEstimate(
        trace=token_trace * norms.n_samples / norms.n_target_tokens,
        sq_norm=norms.mean_sq_norm - token_trace / norms.n_target_tokens,
        weight=float(norms.n_micro_batches - 1),
        n_samples=norms.n_samples,
    )


def two_batch_estimate(
    sq_norm_small_batch: float, sq_norm_big_batch: float, n_small_batch: int, n_big_batch: int
) -> NoiseEstimate:
    """Noise estimate from the gradient's squared norm at two batch sizes, in samples.

    `|G|^2 = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)` and
    `tr(Sigma) = (|g_small|^2 - |g_big|^2) / (1 / B_small - 1 / B_big)` (McCandlish et al. 2018, app. A.1).

    Returns:
        An estimate of weight `B_big / B_small - 1`, which is M - 1 when `sq_norm_small_batch` is the mean
        over the M small batches that make up the big one.

    Raises:
        ValueError: If the batches are not `0 < n_small_batch < n_big_batch`.
    """
    if not 0 < n_small_batch < n_big_batch:
        raise ValueError(f"n_small_batch={n_small_batch} must lie between 0 and n_big_batch={n_big_batch}")
    big_weighted, small_weighted = n_big_batch * sq_norm_big_batch, n_small_batch * sq_norm_small_batch
    return NoiseEstimate(
        trace=(sq_norm_small_batch - sq_norm_big_batch) / (1 / n_small_batch - 1 / n_big_batch),
        sq_norm=(big_weighted - small_weighted) / (n_big_batch - n_small_batch),
        weight=n_big_batch / n_small_batch - 1,
        n_samples=n_big_batch,
    )


class NoiseScaleTracker:
    """Smoothed noise scale: exponential averages of `tr(Sigma)` and `|G|^2` apart, divided last.

    An average of ratios is useless (-49 +- 232 in a simulation whose truth is 62), the ratio of averages is
    not. Each average is `sum_i w_i x_i / sum_i w_i` with `w_i = (M_i - 1) * 0.5 ** (samples since i /
    half_life)`; dividing by the summed weights removes the bias of the start exactly, whatever the batch
    sizes were.

    Args:
        half_life_samples: Samples after which a measurement counts half. Counted in samples, not steps, it
            means the same at every batch size.

    Raises:
        ValueError: If the half-life is not a positive finite number.
    """

    def __init__(self, half_life_samples: float) -> None:
        if not (half_life_samples > 0 and math.isfinite(half_life_samples)):
            raise ValueError(
                f"half_life_samples must be a positive number of samples, got {half_life_samples!r}"
            )
        self.half_life_samples = float(half_life_samples)
        self._trace_sum = 0.0
        self._sq_norm_sum = 0.0
        self._weight_sum = 0.0
        self._n_updates = 0

    def update(self, estimate: NoiseEstimate) -> None:
        """Take in the estimate of a measured step."""
        self.skip(estimate.n_samples)
        self._trace_sum += estimate.weight * estimate.trace
        self._sq_norm_sum += estimate.weight * estimate.sq_norm
        self._weight_sum += estimate.weight
        self._n_updates += 1

    def skip(self, n_samples: int) -> None:
        """Age the averages by samples of a step that was not measured; their values stay as they are."""
        decay = 0.5 ** (n_samples / self.half_life_samples)
        self._trace_sum *= decay
        self._sq_norm_sum *= decay
        self._weight_sum *= decay

    @property
    def trace(self) -> float | None:
        """Average `tr(Sigma)` per sample, None before the first measurement."""
        return self._trace_sum / self._weight_sum if self._weight_sum > 0 else None

    @property
    def sq_norm(self) -> float | None:
        """Average `|G|^2`, None before the first measurement; may be negative while it is mostly noise."""
        return self._sq_norm_sum / self._weight_sum if self._weight_sum > 0 else None

    @property
    def noise_scale(self) -> float | None:
        """`phi = tr(Sigma) / |G|^2` in samples; None, not known yet, while either average is not positive."""
        trace, sq_norm = self.trace, self.sq_norm
        if trace is None or sq_norm is None or trace <= 0 or sq_norm <= 0:
            return None
        noise_scale = trace / sq_norm
        return noise_scale if math.isfinite(noise_scale) else None

    @property
    def n_updates(self) -> int:
        """Measurements taken in."""
        return self._n_updates

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types. The half-life is a setting, not state."""
        return {
            "trace_sum": self._trace_sum,
            "sq_norm_sum": self._sq_norm_sum,
            "weight_sum": self._weight_sum,
            "n_updates": self._n_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: If a key is missing or unknown.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"noise scale state has the keys {', '.join(map(str, state)) or 'none'},"
                f" expected {', '.join(self.state_dict())}: it was not written by this version"
            )
        self._trace_sum = float(state["trace_sum"])
        self._sq_norm_sum = float(state["sq_norm_sum"])
        self._weight_sum = float(state["weight_sum"])
        self._n_updates = int(state["n_updates"])
