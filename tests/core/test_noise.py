from __future__ import annotations

import json
import math
import random
import statistics
import warnings

import pytest

from copus_lightning.core.noise import (
    NoiseEstimate,
    NoiseScaleTracker,
    StepNorms,
    estimate,
    two_batch_estimate,
)


def norms_of(gradients: list[list[float]], tokens: list[int], n_samples: int) -> StepNorms:
    """Norms of micro-batches given by their mean gradients and token counts; empty ones are not counted."""
    total = sum(tokens)
    width = len(gradients[0])
    mean = [sum(b * g[i] for b, g in zip(tokens, gradients, strict=True)) / total for i in range(width)]
    return StepNorms(
        weighted_micro_sq_norm_sum=sum(
            b * sum(x * x for x in g) for b, g in zip(tokens, gradients, strict=True)
        ),
        mean_sq_norm=sum(x * x for x in mean),
        n_micro_batches=sum(b > 0 for b in tokens),
        n_target_tokens=total,
        n_samples=n_samples,
    )


def test_equal_micro_batches_give_the_two_batch_form() -> None:
    draw = random.Random(1)
    for _ in range(50):
        n_micro, micro_size = draw.randint(2, 9), draw.randint(1, 5)
        gradients = [[draw.gauss(0.3, 1) for _ in range(6)] for _ in range(n_micro)]
        found = estimate(norms_of(gradients, [micro_size] * n_micro, n_micro * micro_size))
        mean_micro = statistics.fmean(sum(x * x for x in g) for g in gradients)
        mean = [statistics.fmean(column) for column in zip(*gradients, strict=True)]
        mean_sq_norm = sum(x * x for x in mean)
        expected = two_batch_estimate(mean_micro, mean_sq_norm, micro_size, n_micro * micro_size)
        assert found is not None
        assert found.trace == pytest.approx(expected.trace, rel=1e-9)
        assert found.sq_norm == pytest.approx(expected.sq_norm, rel=1e-9, abs=1e-12)
        assert found.weight == pytest.approx(expected.weight) == n_micro - 1
        # trace = b / (M - 1) * sum_k |g_k - mean g|^2.
        scatter = sum((x - m) ** 2 for g in gradients for x, m in zip(g, mean, strict=True))
        assert found.trace == pytest.approx(micro_size / (n_micro - 1) * scatter)


def test_the_trace_is_per_sample_whatever_the_tokens_of_a_sample() -> None:
    gradients = [[1.0, 2.0], [0.0, 1.5], [2.0, -1.0], [0.5, 0.5]]
    by_sample = estimate(norms_of(gradients, [2, 2, 2, 2], n_samples=8))
    by_token = estimate(norms_of(gradients, [256, 256, 256, 256], n_samples=8))
    assert by_sample is not None and by_token is not None
    assert by_token.trace == pytest.approx(by_sample.trace)
    assert by_token.sq_norm == pytest.approx(by_sample.sq_norm)


def test_the_trace_is_never_negative() -> None:
    draw = random.Random(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            n_micro = draw.randint(2, 8)
            tokens = [draw.randint(0, 6) for _ in range(n_micro)]
            if sum(b > 0 for b in tokens) < 2:
                continue
            gradients = [[draw.gauss(0, 1) * (b > 0) for _ in range(3)] for b in tokens]
            found = estimate(norms_of(gradients, tokens, n_samples=n_micro))
            assert found is not None and found.trace >= -1e-9
        same = estimate(norms_of([[0.1, 0.7]] * 5, [3] * 5, n_samples=5))
        assert same is not None and same.trace == pytest.approx(0, abs=1e-12)


def test_a_masked_micro_batch_changes_nothing() -> None:
    gradients, tokens = [[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]], [4, 2, 5]
    assert estimate(norms_of([*gradients, [0.0, 0.0]], [*tokens, 0], 4)) == estimate(
        norms_of(gradients, tokens, 4)
    )


def test_what_cannot_be_estimated_is_none() -> None:
    assert estimate(StepNorms(8.0, 1.0, n_micro_batches=1, n_target_tokens=8, n_samples=4)) is None
    assert estimate(StepNorms(math.nan, 1.0, n_micro_batches=2, n_target_tokens=8, n_samples=4)) is None
    assert estimate(StepNorms(8.0, math.inf, n_micro_batches=2, n_target_tokens=8, n_samples=4)) is None
    assert estimate(StepNorms(0.0, 0.0, n_micro_batches=2, n_target_tokens=0, n_samples=4)) is None


def test_a_negative_trace_is_loud_and_is_not_used() -> None:
    # 1/n left in the micro-batch gradients: four micro-batches, squares too small by 16.
    with pytest.warns(RuntimeWarning, match="accumulation count") as caught:
        assert estimate(StepNorms(8.0 / 16, 0.9, n_micro_batches=4, n_target_tokens=8, n_samples=4)) is None
    assert "\n" not in str(caught[0].message)


DIMENSION = 6
NOISE_DEVIATION = 1.5


def regression_gradients(draw: random.Random, delta: list[float], sizes: list[int]) -> list[list[float]]:
    """Micro-batch gradients of half the squared error of y = x.w + e at w + delta; a token is a sample."""
    gradients = []
    for size in sizes:
        total = [0.0] * DIMENSION
        for _ in range(size):
            x = [draw.gauss(0, 1) for _ in range(DIMENSION)]
            error = sum(a * b for a, b in zip(x, delta, strict=True)) - draw.gauss(0, NOISE_DEVIATION)
            total = [t + error * a for t, a in zip(total, x, strict=True)]
        gradients.append([t / size for t in total])
    return gradients


def closed_form(delta: list[float]) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 of the regression."""
    sq_norm = sum(x * x for x in delta)
    return (sq_norm + NOISE_DEVIATION**2) * DIMENSION + sq_norm, sq_norm


@pytest.mark.parametrize("sizes", [[2] * 8, [1, 5, 2, 4, 1, 3], [4, 4]])
def test_linear_regression_truth_within_three_standard_errors(sizes: list[int]) -> None:
    draw = random.Random(20 + len(sizes))
    delta = [0.4, -0.2, 0.6, 0.1, -0.5, 0.3]
    trace, sq_norm = closed_form(delta)
    steps = []
    for _ in range(1500):
        found = estimate(norms_of(regression_gradients(draw, delta, sizes), sizes, sum(sizes)))
        assert found is not None
        steps.append(found)
    for values, truth in (([s.trace for s in steps], trace), ([s.sq_norm for s in steps], sq_norm)):
        standard_error = statistics.stdev(values) / math.sqrt(len(values))
        assert abs(statistics.fmean(values) - truth) < 3 * standard_error

    tracker = NoiseScaleTracker(half_life_samples=1e9)
    for step in steps:
        tracker.update(step)
    relative_error = statistics.stdev([s.sq_norm for s in steps]) / math.sqrt(len(steps)) / sq_norm
    assert tracker.noise_scale == pytest.approx(trace / sq_norm, rel=4 * relative_error)


def test_the_equal_size_form_would_be_wrong_on_unequal_sizes() -> None:
    draw = random.Random(3)
    sizes = [1, 1, 1, 13]
    delta = [0.4] * DIMENSION
    weighted, plain = [], []
    for _ in range(1500):
        gradients = regression_gradients(draw, delta, sizes)
        norms = norms_of(gradients, sizes, sum(sizes))
        found = estimate(norms)
        assert found is not None
        weighted.append(found.trace)
        mean_micro = statistics.fmean(sum(x * x for x in g) for g in gradients)
        plain.append(two_batch_estimate(mean_micro, norms.mean_sq_norm, 4, 16).trace)
    truth, _ = closed_form(delta)
    assert statistics.fmean(weighted) == pytest.approx(truth, rel=0.1)
    assert statistics.fmean(plain) > 1.7 * truth


def test_averages_are_debiased_and_divided_last() -> None:
    tracker = NoiseScaleTracker(half_life_samples=100)
    assert tracker.noise_scale is None and tracker.trace is None and tracker.sq_norm is None
    tracker.update(NoiseEstimate(trace=30.0, sq_norm=2.0, weight=3, n_samples=16))
    assert (tracker.trace, tracker.sq_norm) == (pytest.approx(30.0), pytest.approx(2.0))
    assert tracker.noise_scale == pytest.approx(15.0)
    tracker.update(NoiseEstimate(trace=10.0, sq_norm=-1.0, weight=1, n_samples=100))
    # The first measurement is one half-life old: it weighs 3 * 0.5.
    assert tracker.trace == pytest.approx((1.5 * 30 + 10) / 2.5)
    assert tracker.sq_norm == pytest.approx((1.5 * 2 - 1) / 2.5)
    assert tracker.noise_scale == pytest.approx(55 / 2)
    assert tracker.n_updates == 2


def test_the_noise_scale_is_unknown_while_the_squared_norm_is_not_positive() -> None:
    tracker = NoiseScaleTracker(half_life_samples=100)
    tracker.update(NoiseEstimate(trace=30.0, sq_norm=-2.0, weight=1, n_samples=4))
    assert tracker.noise_scale is None
    assert tracker.sq_norm == pytest.approx(-2.0), "it is kept negative, or the average would be biased"
    tracker.update(NoiseEstimate(trace=30.0, sq_norm=4.0, weight=1, n_samples=4))
    assert tracker.noise_scale is not None


def test_half_life_counts_samples_at_any_batch_size() -> None:
    def response(batch: int) -> float:
        tracker = NoiseScaleTracker(half_life_samples=640)
        for level in (0.0, 1.0):
            for _ in range(6400 // batch if level == 0.0 else 640 // batch):
                # The number of micro-batches, so the weight, grows with the batch.
                tracker.update(NoiseEstimate(trace=level, sq_norm=1.0, weight=batch / 2, n_samples=batch))
        assert tracker.trace is not None
        return tracker.trace

    assert response(16) == pytest.approx(0.5, abs=0.01)
    assert response(64) == pytest.approx(0.5, abs=0.01)


def test_unmeasured_steps_age_the_averages_but_leave_their_values() -> None:
    tracker = NoiseScaleTracker(half_life_samples=10)
    tracker.update(NoiseEstimate(trace=4.0, sq_norm=2.0, weight=1, n_samples=1))
    tracker.skip(10)
    assert tracker.noise_scale == pytest.approx(2.0)
    tracker.update(NoiseEstimate(trace=8.0, sq_norm=2.0, weight=1, n_samples=0))
    assert tracker.trace == pytest.approx((0.5 * 4 + 8) / 1.5)


def test_ratio_of_averages_finds_the_truth_that_average_of_ratios_misses() -> None:
    draw = random.Random(4)
    tracker = NoiseScaleTracker(half_life_samples=1e7)
    negative = 0
    for _ in range(4000):
        # One step at M = 2 with phi = 62: the squared norm is mostly noise.
        sq_norm = draw.gauss(1.0, 2.6)
        negative += sq_norm < 0
        tracker.update(NoiseEstimate(trace=62 * draw.expovariate(1), sq_norm=sq_norm, weight=1, n_samples=4))
    assert negative / 4000 == pytest.approx(0.35, abs=0.05)
    assert tracker.noise_scale == pytest.approx(62, rel=0.15)


def test_state_round_trip_is_exact_and_strict() -> None:
    first, second = NoiseScaleTracker(50), NoiseScaleTracker(50)
    draw = random.Random(5)
    steps = [NoiseEstimate(draw.random(), draw.random() - 0.2, draw.randint(1, 7), 16) for _ in range(20)]
    for step in steps[:10]:
        first.update(step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in steps[10:]:
        first.update(step)
        second.update(step)
    assert second.state_dict() == first.state_dict()
    assert second.noise_scale == first.noise_scale
    with pytest.raises(ValueError, match="trace_sum") as error:
        second.load_state_dict({"trace": 1.0})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("half_life", [0, -1, math.inf, math.nan])
def test_a_senseless_half_life_is_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life_samples"):
        NoiseScaleTracker(half_life_samples=half_life)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 4), (8, 4)])
def test_two_batches_must_differ(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="n_small_batch"):
        two_batch_estimate(1.0, 1.0, *sizes)
