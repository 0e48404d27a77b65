from __future__ import annotations

import json
import math
import random

import pytest

from copus_lightning.core.layout import Layout
from copus_lightning.core.step_time import LiveCorrection, fit_step_time


def relative_squares(alpha: float, beta: float, points: list[tuple[int, float]]) -> float:
    return sum(((alpha + n * beta - t) / t) ** 2 for n, t in points)


def test_an_exact_line_is_found_with_no_error() -> None:
    draw = random.Random(0)
    for _ in range(50):
        alpha, beta = draw.uniform(0, 2), draw.uniform(0.001, 2)
        points = [(n, alpha + n * beta) for n in draw.sample(range(1, 300), 5)]
        fit = fit_step_time(points)
        assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-9, abs=1e-9)
        assert fit.beta_seconds == pytest.approx(beta, rel=1e-9)
        assert fit.left_out_error == pytest.approx(0, abs=1e-9)
        assert fit.step_seconds(1000) == pytest.approx(alpha + 1000 * beta)


def test_the_fit_is_the_least_relative_error_among_non_negative_lines() -> None:
    draw = random.Random(1)
    for _ in range(100):
        points = [(n, draw.uniform(0.1, 3)) for n in draw.sample(range(1, 20), draw.randint(2, 5))]
        fit = fit_step_time(points)
        assert fit.alpha_seconds >= 0 and fit.beta_seconds >= 0
        best = relative_squares(fit.alpha_seconds, fit.beta_seconds, points)
        for _ in range(50):
            alpha = max(0, fit.alpha_seconds + draw.gauss(0, 0.2))
            beta = max(0, fit.beta_seconds + draw.gauss(0, 0.05))
            assert best <= relative_squares(alpha, beta, points) + 1e-12


def test_neither_part_goes_below_zero() -> None:
    falling = fit_step_time([(1, 2.0), (2, 1.0), (4, 0.5)])
    assert falling.beta_seconds == 0 and falling.alpha_seconds > 0
    steep = fit_step_time([(1, 1.0), (2, 4.0), (4, 16.0)])
    assert steep.alpha_seconds == 0 and steep.beta_seconds > 0


def test_error_is_the_largest_over_left_out_points() -> None:
    # Without (4, 6.0) the others lie on 1 + n, which gives 5: off by 1/6.
    points = [(1, 2.0), (2, 3.0), (4, 6.0)]
    errors = []
    for n, seconds in points:
        rest = fit_step_time([point for point in points if point[0] != n])
        assert rest.left_out_error is None
        errors.append(abs(rest.step_seconds(n) - seconds) / seconds)
    assert errors[2] == pytest.approx(1 / 6)
    assert fit_step_time(points).left_out_error == pytest.approx(max(errors))


def test_one_point_promises_nothing_from_more_accumulation() -> None:
    fit = fit_step_time([(4, 2.0)])
    assert (fit.alpha_seconds, fit.beta_seconds, fit.left_out_error) == (0.0, 0.5, None)


DP, PP = (Layout(data=2), 1), (Layout(pipeline=2), 1)


def test_live_ratio_is_per_pair_and_a_pair_never_run_takes_that_of_the_present_one() -> None:
    live = LiveCorrection(half_life_steps=10)
    assert live.ratio(DP) == 1.0
    live.observe(DP, 2.0)
    assert live.ratio(DP) == pytest.approx(2.0), "debiased: the first step counts fully"
    assert live.ratio(PP) == pytest.approx(2.0)
    live.observe(PP, 0.5)
    assert live.ratio(DP) == pytest.approx(2.0)
    assert live.ratio(PP) == pytest.approx(0.5)
    # The same layout with another micro-batch inherits nothing from it.
    assert live.ratio((Layout(data=2), 4)) == pytest.approx(0.5)
    live.observe(DP, 2.0)
    assert live.ratio((Layout(data=2), 4)) == pytest.approx(2.0)


def test_live_ratio_forgets_by_half_life_and_shrugs_at_a_hiccup() -> None:
    live = LiveCorrection(half_life_steps=8)
    for _ in range(400):
        live.observe(DP, 1.0)
    live.observe(DP, 20.0)
    assert live.ratio(DP) < 1.35
    live = LiveCorrection(half_life_steps=8)
    for _ in range(400):
        live.observe(DP, 1.0)
    for _ in range(8):
        live.observe(DP, 4.0)
    assert math.log(live.ratio(DP)) == pytest.approx(0.5 * math.log(4.0), rel=1e-6)


def test_live_ratio_state_round_trip() -> None:
    first, second = LiveCorrection(), LiveCorrection()
    for ratio in (1.1, 1.3, 0.9):
        first.observe(DP, ratio)
    first.observe(PP, 1.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for live in (first, second):
        live.observe(DP, 1.2)
    assert second.state_dict() == first.state_dict()
    assert second.ratio(DP) == first.ratio(DP)


def test_half_life_must_be_positive() -> None:
    with pytest.raises(ValueError, match="half_life_steps"):
        LiveCorrection(half_life_steps=0)
