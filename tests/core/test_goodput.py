from __future__ import annotations

import math
import random

import pytest

from copus_lightning.core.goodput import OBJECTIVES, goodput, lr_aware_goodput, statistical_efficiency


def test_known_values() -> None:
    assert statistical_efficiency(512, 256, 2.0) == pytest.approx(0.5)
    assert statistical_efficiency(0, 256, 2.0) == 1.0
    assert goodput(10.0, 512, 256, 2.0) == pytest.approx(5.0)
    assert lr_aware_goodput(10.0, 16, 8, 2.0) == pytest.approx(20.0)
    assert {"goodput": goodput, "lr_aware": lr_aware_goodput} == OBJECTIVES


def test_efficiency_is_a_falling_fraction_with_diminishing_returns() -> None:
    draw = random.Random(0)
    for _ in range(500):
        phi, c = 10 ** draw.uniform(-2, 5), draw.uniform(0.1, 10)
        batch = 10 ** draw.uniform(0, 5)
        here, larger = (statistical_efficiency(b, phi, c) for b in (batch, 2 * batch))
        assert 0 < larger < here <= 1
        # Useful samples of a step, B * SE(B), still grow, but never twofold, and never beyond c * phi.
        assert batch * here < 2 * batch * larger < 2 * batch * here
        assert 2 * batch * larger < c * phi * (1 + 1e-9)
        assert statistical_efficiency(batch, 2 * phi, c) > here
        assert here == pytest.approx(statistical_efficiency(batch, c * phi, 1.0))


def test_goodput_never_exceeds_throughput_and_follows_it() -> None:
    draw = random.Random(1)
    for _ in range(200):
        throughput, batch, phi = (10 ** draw.uniform(0, 4) for _ in range(3))
        value = goodput(throughput, batch, phi, 2.0)
        assert 0 < value <= throughput
        assert goodput(3 * throughput, batch, phi, 2.0) == pytest.approx(3 * value)
        assert lr_aware_goodput(throughput, batch, phi, 2.0) == pytest.approx(value * math.sqrt(batch))


def best_batch(objective: str, throughput, sizes: range, critical: float) -> int:
    return max(sizes, key=lambda batch: OBJECTIVES[objective](throughput(batch), batch, critical / 2, 2.0))


def test_constant_throughput_optima() -> None:
    assert best_batch("goodput", lambda b: 7.0, range(1, 2000), 512) == 1
    assert best_batch("lr_aware", lambda b: 7.0, range(1, 2000), 512) == 512


@pytest.mark.parametrize(
    ("half", "plain", "aware"), [(64, 181.0, 713.7), (256, 362.0, 1119.3), (2048, 1024.0, 3467.3)]
)
def test_affine_step_time_optima(half: int, plain: float, aware: float) -> None:
    def throughput(batch: float) -> float:
        return 1000 * batch / (batch + half)

    assert abs(best_batch("goodput", throughput, range(1, 6000), 512) - plain) <= 0.75
    assert abs(best_batch("lr_aware", throughput, range(1, 6000), 512) - aware) <= 0.75
    assert math.sqrt(half * 512) == pytest.approx(plain, abs=0.05)
    total = half + 512
    assert (total + math.sqrt(total**2 + 12 * half * 512)) / 2 == pytest.approx(aware, abs=0.05)


def test_lr_aware_has_no_interior_optimum_when_throughput_follows_the_batch() -> None:
    assert best_batch("lr_aware", lambda b: 3.0 * b, range(1, 5000), 64) == 4999
