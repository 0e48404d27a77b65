from __future__ import annotations

import itertools
import math
import random

import pytest

from copus_lightning.core.learning_rate import RULES, TokenSchedule, factor


def test_known_values() -> None:
    assert factor("none", 64, 16) == 1.0
    assert factor("linear", 64, 16) == 4.0
    assert factor("sqrt", 64, 16) == 2.0
    assert factor("linear", 4, 16) == 0.25
    assert factor(lambda ratio: ratio**0.25, 256, 16) == pytest.approx(2.0)


def test_surge_is_the_formula_and_peaks_at_the_critical_batch() -> None:
    def surge(batch: float, critical: float) -> float:
        return 1 / (0.5 * (math.sqrt(critical / batch) + math.sqrt(batch / critical)))

    draw = random.Random(0)
    for _ in range(100):
        batch, reference = draw.randint(1, 4096), draw.randint(1, 4096)
        phi, c = draw.uniform(0.5, 3000), draw.uniform(0.5, 4)
        expected = surge(batch, c * phi) / surge(reference, c * phi)
        assert factor("surge", batch, reference, phi, c) == pytest.approx(expected)
    values = {batch: factor("surge", batch, 16, 100.0, 2.0) for batch in range(16, 2000)}
    assert max(values, key=values.__getitem__) == 200
    assert factor("surge", 64, 16, None) == factor("sqrt", 64, 16)
    assert factor("surge", 64, 16, 1e12) == pytest.approx(2.0), "sqrt is the limit of a large noise scale"


@pytest.mark.parametrize("rule", [*RULES, lambda ratio: ratio**0.3])
def test_factors_are_one_at_the_reference_and_never_compound(rule) -> None:
    draw = random.Random(1)
    assert factor(rule, 32, 32, 50.0) == pytest.approx(1.0)
    reference = {size: factor(rule, size, 32, 50.0) for size in (8, 16, 32, 64, 128, 256)}
    size = 32
    for _ in range(500):  # up, down and back again, any number of times
        size = draw.choice(list(reference))
        assert factor(rule, size, 32, 50.0) == reference[size]


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learning_rate_rule='sqr' .*none, linear, sqrt, surge"):
        factor("sqr", 32, 32)
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="learning_rate_rule gave"):
            factor(lambda ratio, value=value: value, 32, 32)


def test_schedules_at_known_points() -> None:
    cosine = TokenSchedule("cosine", total_tokens=1100, warmup_tokens=100, final_factor=0.1)
    assert [cosine(t) for t in (0, 50, 100)] == pytest.approx([0, 0.5, 1])
    assert cosine(600) == pytest.approx(0.55)
    assert [cosine(1100), cosine(5000)] == pytest.approx([0.1, 0.1])
    wsd = TokenSchedule("wsd", total_tokens=1000, warmup_tokens=100, decay_tokens=200)
    assert [wsd(t) for t in (50, 100, 500, 800, 900, 1000, 2000)] == pytest.approx([0.5, 1, 1, 1, 0.5, 0, 0])
    linear = TokenSchedule("linear", total_tokens=1000, final_factor=0.5)
    assert [linear(t) for t in (0, 500, 1000, 1500)] == pytest.approx([1, 0.75, 0.5, 0.5])
    constant = TokenSchedule("constant", total_tokens=1000, warmup_tokens=10)
    assert [constant(t) for t in (5, 10, 1e9)] == pytest.approx([0.5, 1, 1])
    warmup_only = TokenSchedule("cosine", total_tokens=100, warmup_tokens=100, final_factor=0.2)
    assert [warmup_only(99), warmup_only(100)] == pytest.approx([0.99, 0.2])


def test_schedules_are_fractions_that_rise_then_fall() -> None:
    draw = random.Random(2)
    for _ in range(100):
        kind = draw.choice(["constant", "linear", "cosine", "wsd"])
        warmup, decay, rest = draw.randint(0, 50), draw.randint(1, 50), draw.randint(1, 100)
        schedule = TokenSchedule(
            kind, warmup + decay + rest, warmup, decay if kind == "wsd" else None, draw.random()
        )
        values = [schedule(tokens) for tokens in range(warmup + decay + rest + 20)]
        assert all(0 <= value <= 1 for value in values)
        assert values[:warmup] == sorted(values[:warmup])
        after = values[warmup:]
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
        if kind != "constant":
            assert values[-1] == pytest.approx(schedule.final_factor)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "cosin"}, "kind='cosin'"),
        ({"total_tokens": 0}, "total_tokens"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"warmup_tokens": 2000}, "warmup_tokens=2000"),
        ({"decay_tokens": 10}, "decay_tokens"),
        ({"kind": "wsd"}, "decay_tokens"),
        ({"kind": "wsd", "decay_tokens": 0}, "decay_tokens"),
        ({"kind": "wsd", "decay_tokens": 900, "warmup_tokens": 200}, "do not fit"),
        ({"final_factor": 1.5}, "final_factor"),
    ],
)
def test_bad_schedules_are_refused(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        TokenSchedule(**{"kind": "cosine", "total_tokens": 1000, **fields})
    assert "\n" not in str(error.value)
