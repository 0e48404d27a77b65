"""Statistical efficiency and Goodput: how much of a batch's samples the optimizer can use, and how fast.

With the noise scale `phi` and a coefficient `c`, `c * phi` is the critical batch, at which half is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

DEFAULT_COEFFICIENT = 2.0  # the paper's choice of c; its calibration is an open problem


def statistical_efficiency(
    global_batch_size: float, noise_scale: float, coefficient: float = DEFAULT_COEFFICIENT
) -> float:
    """`SE(B) = 1 / (1 + B / (c * phi))`, in (0, 1], falling in B (McCandlish et al. 2018; Pollux, OSDI '21).

    Pollux divides by the value at the initial batch; a constant never changes which batch is best.

    Args:
        global_batch_size: B, samples.
        noise_scale: phi, samples; positive.
        coefficient: c, without unit; positive.
    """
    critical_batch_size = coefficient * noise_scale
    assert global_batch_size >= 0 and critical_batch_size > 0
    return critical_batch_size / (critical_batch_size + global_batch_size)


def goodput(
    throughput: float, global_batch_size: float, noise_scale: float, coefficient: float = DEFAULT_COEFFICIENT
) -> float:
    """`T * SE(B)`: useful samples per second (COPUS, arXiv 2604.26687).

    Args:
        throughput: T, samples/s of the configuration.
        global_batch_size: B, samples.
        noise_scale: phi, samples.
        coefficient: c.
    """
    return throughput * statistical_efficiency(global_batch_size, noise_scale, coefficient)


def lr_aware_goodput(
    throughput: float, global_batch_size: float, noise_scale: float, coefficient: float = DEFAULT_COEFFICIENT
) -> float:
    """`T * SE(B) * sqrt(B)`, for Adam-type optimizers whose learning rate follows `sqrt(B)` (COPUS, eq. 8).

    With `T` in proportion to `B` it grows without end, so a policy that uses it needs a cap on the batch.

    Args:
        throughput: T, samples/s of the configuration.
        global_batch_size: B, samples.
        noise_scale: phi, samples.
        coefficient: c.
    """
    return goodput(throughput, global_batch_size, noise_scale, coefficient) * math.sqrt(global_batch_size)


OBJECTIVES: dict[str, Callable[[float, float, float, float], float]] = {
    "goodput": goodput,
    "lr_aware": lr_aware_goodput,
}
