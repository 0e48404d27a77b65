from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from copus_lightning.core.goodput import OBJECTIVES
from copus_lightning.core.layout import Configuration, Layout, enumerate_layouts
from copus_lightning.core.policy import Copus, CriticalBatch, Decision, Observation, Ramp, Static
from copus_lightning.core.profile import Infeasible, Measurement, Profile

DP, PP, TP = Layout(data=2), Layout(pipeline=2), Layout(tensor=2)


def profile_of(curves: dict[tuple[Layout, int], tuple[float, float]], world_size: int = 2) -> Profile:
    """A profile whose fits are `(alpha, beta)` exactly."""
    return Profile(
        model={},
        hardware={},
        world_size=world_size,
        measurements=[
            Measurement(layout, micro, n, alpha + n * beta)
            for (layout, micro), (alpha, beta) in curves.items()
            for n in (1, 4, 16)
        ],
    )


# Small batches want the pipeline, large ones data parallelism: 0.5 s against 0.8 s at 4 samples, and 4.7 s
# against 3.8 s at 64.
CROSSING = {(PP, 1): (0.2, 0.07), (DP, 1): (0.6, 0.1)}


def observe(configuration: Configuration, noise_scale: float | None = 100.0, **fields) -> Observation:
    known = {"tokens": 10_000, "samples": 100, "step": 10, "seconds": 60.0}
    return Observation(configuration, noise_scale, **{**known, **fields})


def one_line(text: str) -> str:
    assert text and "\n" not in text
    return text


# -- Copus: what is best -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "plain", "aware"), [(64, 181.0, 713.7), (256, 362.0, 1119.3), (2048, 1024.0, 3467.3)]
)
def test_copus_finds_the_closed_form_optimum(half: int, plain: float, aware: float) -> None:
    """T = T_max B / (B + b) with c * phi = 512: the measured optimum is the formula's, to a sample."""
    one = Layout()
    profile = profile_of({(one, 1): (half / 1000, 1 / 1000)}, world_size=1)
    for objective, optimum in (("goodput", plain), ("lr_aware", aware)):
        sizes = range(math.floor(optimum) - 60, math.ceil(optimum) + 61)
        policy = Copus(profile, sizes, objective=objective, max_batch_growth=None, batch_threshold=0.0)
        decision = policy.decide(observe(Configuration(one, 1, 1), noise_scale=256.0))
        assert decision.configuration is not None
        assert abs(decision.configuration.global_batch_size - optimum) <= 0.75


def test_copus_is_the_brute_force_best_over_random_profiles() -> None:
    draw = random.Random(0)
    for _ in range(60):
        curves = {
            (layout, micro): (draw.uniform(0, 2), draw.uniform(0.01, 0.3) * micro**0.8)
            for layout in enumerate_layouts(4)
            for micro in (1, 2, 4)
            if draw.random() < 0.7
        }
        if not curves:
            continue
        profile = profile_of(curves, world_size=4)
        sizes, phi, c = (16, 32, 64, 128), 10 ** draw.uniform(-1, 3), draw.uniform(0.5, 4)
        objective = draw.choice(list(OBJECTIVES))
        (layout, micro) = draw.choice(list(curves))
        now = Configuration(layout, draw.choice(sizes), micro)
        policy = Copus(profile, sizes, objective, c, 0.0, max_batch_growth=None, batch_threshold=0.0)
        decision = policy.decide(observe(now, phi))

        def value(configuration, profile=profile, objective=objective, phi=phi, c=c) -> float:
            throughput = configuration.global_batch_size / profile.step_seconds(configuration)
            return OBJECTIVES[objective](throughput, configuration.global_batch_size, phi, c)

        best = max(value(configuration) for configuration in profile.configurations(sizes))
        chosen = decision.configuration or now
        assert value(chosen) == pytest.approx(best)
        assert [c.goodput for c in decision.candidates] == sorted(
            (c.goodput for c in decision.candidates), reverse=True
        )


def test_every_layout_and_batch_is_listed_with_its_best_micro_batch() -> None:
    profile = profile_of({**CROSSING, (DP, 2): (0.6, 0.15), (PP, 2): (0.2, 0.2)})
    now = Configuration(PP, 4, 2)
    decision = Copus(profile, [4, 8]).decide(observe(now))
    assert {c.configuration for c in decision.candidates} == {
        now,  # listed for comparison, though not the best micro-batch
        Configuration(PP, 4, 1),
        Configuration(PP, 8, 1),
        Configuration(DP, 4, 2),
        Configuration(DP, 8, 2),
    }
    for candidate in decision.candidates:
        assert candidate.throughput == pytest.approx(profile.throughput(candidate.configuration))


def test_a_rising_noise_scale_raises_the_batch_and_crosses_to_data_parallelism() -> None:
    policy = Copus(profile_of(CROSSING), [4, 8, 16, 32, 64])
    now, path = Configuration(PP, 4, 1), []
    for phi in (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        decision = policy.decide(observe(now, phi, switch_seconds=1.0, remaining_seconds=10_000.0))
        now = decision.configuration or now
        path.append(now)
    assert path[0].layout == PP and path[-1].layout == DP
    assert path[-1].global_batch_size == 64
    batches = [configuration.global_batch_size for configuration in path]
    assert batches == sorted(batches)


# -- Copus: when it moves ------------------------------------------------------------------------------------


def test_an_unknown_noise_scale_means_stay() -> None:
    decision = Copus(profile_of(CROSSING), [4, 64]).decide(observe(Configuration(PP, 4, 1), None))
    assert decision == Decision(None, "stay: the noise scale is not known yet")


def test_the_growth_cap_is_a_factor_per_decision_upwards_only() -> None:
    profile = profile_of(CROSSING)
    sizes = [4, 8, 16, 32, 64]
    for growth, expected in ((2.0, 8), (4.0, 16), (None, 64)):
        decision = Copus(profile, sizes, max_batch_growth=growth, allow_layout=False).decide(
            observe(Configuration(PP, 4, 1), 1e5)
        )
        assert decision.configuration == Configuration(PP, expected, 1)
    down = Copus(profile, sizes, allow_layout=False).decide(observe(Configuration(PP, 64, 1), 0.01))
    assert down.configuration == Configuration(PP, 4, 1)


def test_a_list_sparser_than_the_cap_is_climbed_one_size_at_a_time() -> None:
    policy = Copus(profile_of(CROSSING), [4, 16, 64], allow_layout=False)
    decision = policy.decide(observe(Configuration(PP, 4, 1), 1e5))
    assert decision.configuration == Configuration(PP, 16, 1)


def two_layouts(gain: float) -> tuple[Profile, Configuration, Configuration]:
    """The second is faster than the first by `gain`, at every batch."""
    profile = profile_of({(PP, 1): (0.0, 0.1), (DP, 1): (0.0, 0.2 / (1 + gain))})
    return profile, Configuration(PP, 8, 1), Configuration(DP, 8, 1)


def test_a_layout_change_must_pass_the_threshold() -> None:
    for gain, moves in ((0.05, False), (0.099, False), (0.101, True), (0.5, True)):
        profile, now, better = two_layouts(gain)
        decision = Copus(profile, [8], threshold=0.10).decide(observe(now))
        assert decision.configuration == (better if moves else None)
        if not moves:
            assert "below the threshold of 10%" in one_line(decision.reason)


def test_a_layout_change_must_win_back_its_cost() -> None:
    """(J1 - J0) H > J1 tau: with J1 = 1.25 J0 a switch of 20 s needs H > 100 s."""
    profile, now, better = two_layouts(0.25)
    for dwell, remaining, moves in (
        (101.0, None, True),
        (99.0, None, False),
        (None, 101.0, True),
        (None, 99.0, False),
        (1000.0, 99.0, False),
        (99.0, 1000.0, False),
        (None, None, True),
        (None, 0.0, False),
    ):
        decision = Copus(profile, [8], dwell_seconds=dwell).decide(
            observe(now, switch_seconds=20.0, remaining_seconds=remaining)
        )
        assert decision.configuration == (better if moves else None)
        if not moves:
            assert "100 s to win back" in one_line(decision.reason)
    free = Copus(profile, [8], dwell_seconds=1.0).decide(observe(now, switch_seconds=0.0))
    assert free.configuration == better


def test_no_layout_change_during_the_cool_down() -> None:
    profile, now, better = two_layouts(1.0)
    policy = Copus(profile, [8, 16], cooldown_tokens=1000)
    for since, moves in ((None, True), (1000, True), (999, False), (0, False)):
        decision = policy.decide(observe(now, 1.0, tokens_since_layout_switch=since))
        assert (decision.configuration == better) is moves
    assert "cool-down" in one_line(decision.reason)
    # The batch goes on meanwhile.
    profile, now, better = two_layouts(0.0)
    fixed = profile_of({(PP, 1): (1.0, 0.1), (DP, 1): (0.1, 0.01)})
    decision = Copus(fixed, [8, 16], cooldown_tokens=1000).decide(observe(now, tokens_since_layout_switch=1))
    assert decision.configuration == Configuration(PP, 16, 1)


def test_a_layout_change_is_measured_against_the_best_that_costs_nothing() -> None:
    """Doubling the batch in place gains most of what the other layout would, so nothing is rebuilt."""
    profile = profile_of({(PP, 1): (1.0, 0.1), (DP, 1): (1.0, 0.19)})
    now = Configuration(PP, 8, 1)
    decision = Copus(profile, [8, 16], threshold=0.10).decide(observe(now, 1e6))
    assert decision.candidates[0].configuration == Configuration(DP, 16, 1)
    assert decision.configuration == Configuration(PP, 16, 1)


def test_a_batch_change_needs_its_small_margin_only() -> None:
    profile = profile_of({(PP, 1): (0.0, 0.100), (PP, 2): (0.0, 0.197)})
    now, better = Configuration(PP, 8, 1), Configuration(PP, 8, 2)  # 1.5% faster
    assert Copus(profile, [8]).decide(observe(now)).configuration is None
    assert Copus(profile, [8], batch_threshold=0.01).decide(observe(now)).configuration == better


def test_layouts_can_be_left_alone() -> None:
    profile, now, _ = two_layouts(5.0)
    decision = Copus(profile, [8], allow_layout=False).decide(observe(now))
    assert decision.configuration is None
    assert decision.candidates[0].configuration.layout == DP, "still listed, for the record"


def test_what_failed_is_not_chosen_again() -> None:
    profile, now, better = two_layouts(1.0)
    policy = Copus(profile, [8])
    assert policy.decide(observe(now)).configuration == better
    policy.failed(better, "out of memory")
    assert policy.decide(observe(now)).configuration is None
    resumed = Copus(two_layouts(1.0)[0], [8])
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert resumed.decide(observe(now)).configuration is None
    assert profile.infeasible == [Infeasible(DP, 1, "out of memory")]


def test_observed_steps_change_the_decision() -> None:
    profile, now, better = two_layouts(0.15)
    policy = Copus(profile, [8])
    assert policy.decide(observe(now)).configuration == better
    # Here the pipeline runs as measured, and data parallelism turned out slower than measured.
    policy.observe(now, profile.step_seconds(now))
    policy.observe(better, 1.3 * profile.step_seconds(better))
    assert policy.decide(observe(now)).configuration is None
    assert policy.throughput(better) == pytest.approx(8 / (1.3 * profile.step_seconds(better)))
    assert policy.throughput(Configuration(TP, 8, 1)) is None


def test_a_present_configuration_without_a_profile_stays_and_is_refused_at_the_start() -> None:
    policy = Copus(profile_of(CROSSING), [8])
    decision = policy.decide(observe(Configuration(TP, 8, 1)))
    assert decision.configuration is None and "not in the profile" in one_line(decision.reason)
    with pytest.raises(ValueError, match=r"dp1-tp2-pp1 .* dp1-tp1-pp2 micro-batch 1.*copus profile") as error:
        policy.check(Configuration(TP, 8, 1))
    one_line(str(error.value))
    policy.check(Configuration(PP, 12, 1))


def test_ties_and_order_do_not_depend_on_the_profile_s_order() -> None:
    profile = profile_of({(PP, 1): (0.5, 0.1), (TP, 1): (0.5, 0.1), (DP, 1): (5.0, 5.0)})
    now = Configuration(DP, 8, 1)
    forward = Copus(profile, [8, 16]).decide(observe(now))
    profile.measurements.reverse()
    assert Copus(profile, [8, 16]).decide(observe(now)) == forward


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"global_batch_sizes": []}, "global_batch_sizes"),
        ({"global_batch_sizes": [8, 0]}, "global_batch_sizes"),
        ({"global_batch_sizes": ["8"]}, "global_batch_sizes"),
        ({"objective": "throughput"}, "objective='throughput' .*goodput, lr_aware"),
        ({"critical_batch_coefficient": 0}, "critical_batch_coefficient"),
        ({"threshold": -0.1}, "threshold"),
        ({"batch_threshold": math.nan}, "batch_threshold"),
        ({"max_batch_growth": 1.0}, "max_batch_growth"),
        ({"cooldown_tokens": -1}, "cooldown_tokens"),
        ({"dwell_seconds": 0}, "dwell_seconds"),
    ],
)
def test_bad_settings_are_refused_in_one_line(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        Copus(**{"profile": profile_of(CROSSING), "global_batch_sizes": [8], **fields})
    one_line(str(error.value))


def test_a_batch_that_no_configuration_can_run_is_refused() -> None:
    profile = profile_of({(DP, 2): (0.1, 0.1), (DP, 3): (0.1, 0.1)})
    with pytest.raises(ValueError, match=r"global_batch_sizes: 10 .*multiples of one of 4, 6") as error:
        Copus(profile, [8, 10])
    one_line(str(error.value))


# -- the others ----------------------------------------------------------------------------------------------


def test_the_critical_batch_is_followed_in_a_fixed_layout() -> None:
    sizes = [8, 16, 32, 64, 128]
    policy = CriticalBatch(None, sizes, coefficient=2.0, max_batch_growth=None)
    for phi, expected in ((0.1, 8), (5.5, 8), (6.0, 16), (16, None), (22, None), (23, 64), (1000, 128)):
        now = Configuration(DP, 32 if expected != 32 else 16, 1)
        decision = policy.decide(observe(now, phi))
        found = decision.configuration
        assert (found.global_batch_size if found else None) == expected
        assert found is None or found.layout == DP
        one_line(decision.reason)
    assert policy.decide(observe(Configuration(DP, 32, 1), None)).configuration is None
    capped = CriticalBatch(None, sizes).decide(observe(Configuration(DP, 8, 1), 1000.0))
    assert capped.configuration == Configuration(DP, 16, 1)


def test_the_micro_batch_follows_the_batch() -> None:
    profile = profile_of(
        {(DP, 1): (0.1, 0.1), (DP, 2): (0.1, 0.15), (DP, 4): (0.1, 0.25), (PP, 8): (0.1, 0.1)}
    )
    policy = CriticalBatch(profile, [4, 8, 16], max_batch_growth=None)
    now = Configuration(DP, 4, 1)
    assert policy.decide(observe(now, 4.0)).configuration == Configuration(DP, 8, 4)
    policy.failed(Configuration(DP, 8, 4), "out of memory")
    assert policy.decide(observe(now, 4.0)).configuration == Configuration(DP, 8, 2)
    assert policy.throughput(now) == pytest.approx(4 / 0.3)

    bare = CriticalBatch(None, [4, 8, 16], max_batch_growth=None)
    bare.observe(Configuration(DP, 16, 4), 1.0)
    assert bare.decide(observe(Configuration(DP, 16, 4), 2.0)).configuration == Configuration(DP, 4, 2)
    back = bare.decide(observe(Configuration(DP, 4, 2), 8.0)).configuration
    assert back == Configuration(DP, 16, 4), "as large as the run has used"
    bare.failed(Configuration(DP, 16, 4), "out of memory")
    resumed = CriticalBatch(None, [4, 8, 16], max_batch_growth=None)
    resumed.load_state_dict(json.loads(json.dumps(bare.state_dict())))
    for policy in (bare, resumed):
        assert policy.decide(observe(Configuration(DP, 4, 2), 8.0)).configuration == Configuration(DP, 16, 2)
    assert bare.throughput(now) is None


def test_batches_that_the_layout_cannot_run_are_passed_over() -> None:
    policy = CriticalBatch(None, [3, 9, 10], max_batch_growth=None)
    assert policy.decide(observe(Configuration(DP, 2, 1), 4.5)).configuration == Configuration(DP, 10, 1)
    none = CriticalBatch(None, [3, 9]).decide(observe(Configuration(DP, 2, 1), 4.5))
    assert none.configuration is None and "none of the global batches" in one_line(none.reason)


def test_a_ramp_is_read_in_megatrons_notation_and_followed() -> None:
    ramp = Ramp("0:768 250B:1536 1T:3072")
    assert ramp.stages == ((0, 768), (250 * 10**9, 1536), (10**12, 3072))
    assert [ramp.batch_at(t) for t in (0, 250 * 10**9 - 1, 250 * 10**9, 10**13)] == [768, 768, 1536, 3072]
    assert Ramp("0:4 1.5K:8").stages == ((0, 4), (1500, 8))

    ramp = Ramp("0:4 1K:8 2M:16")
    now = Configuration(DP, 4, 2)
    assert ramp.decide(observe(now, None, tokens=999)).configuration is None
    assert ramp.decide(observe(now, None, tokens=1000)).configuration == Configuration(DP, 8, 2)
    # After a pre-emption the ramp goes on where it was: it is a function of tokens.
    assert ramp.decide(observe(now, None, tokens=3_000_000)).configuration == Configuration(DP, 16, 2)
    ramp.check(now)
    with pytest.raises(ValueError, match=r"ramp: global_batch_size=4 .*use 8") as error:
        ramp.check(Configuration(Layout(data=8), 8, 1))
    one_line(str(error.value))
    stuck = Ramp("0:4 10:5").decide(observe(now, tokens=10))
    assert stuck.configuration is None and "cannot run" in one_line(stuck.reason)


@pytest.mark.parametrize(
    "schedule", ["", "768", "0:0", "10:4", "0:4 0:8", "0:4 2K:8 1K:16", "0:4 5X:8", "0:4,1K:8"]
)
def test_nonsense_ramps_are_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match="ramp") as error:
        Ramp(schedule)
    one_line(str(error.value))


def test_static_stays_or_goes_once() -> None:
    now, there = Configuration(DP, 4, 2), Configuration(PP, 8, 1)
    assert Static().decide(observe(now)).configuration is None
    policy = Static(there)
    assert policy.decide(observe(now, None)).configuration == there
    assert policy.decide(observe(there)).configuration is None
    policy.failed(now, "out of memory")
    assert policy.decide(observe(now)).configuration == there
    policy.failed(there, "out of memory")
    resumed = Static(there)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert resumed.decide(observe(now)).configuration is None


def test_decisions_are_plain_json() -> None:
    decision = Copus(profile_of(CROSSING), [4, 8]).decide(observe(Configuration(PP, 4, 1), 1e4))
    fields = json.loads(json.dumps(decision.to_dict()))
    assert Configuration.from_dict(fields["configuration"]) == decision.configuration
    assert fields["reason"] == decision.reason
    assert set(fields["candidates"][0]) == {
        "layout", "global_batch_size", "micro_batch_size", "throughput", "goodput"
    }  # fmt: skip
    assert Decision(None, "stay").to_dict() == {"configuration": None, "reason": "stay", "candidates": []}


def test_deciding_changes_nothing() -> None:
    profile = profile_of(CROSSING)
    policy = Copus(profile, [4, 8, 16])
    observation = observe(Configuration(PP, 4, 1), 50.0)
    before = json.dumps(policy.state_dict())
    first = policy.decide(observation)
    assert policy.decide(dataclasses.replace(observation)) == first
    assert json.dumps(policy.state_dict()) == before


def test_copus_avoids_steps_of_one_micro_batch() -> None:
    """With one micro-batch per step the noise scale could not be measured any more, however fast it is."""
    profile = profile_of({(PP, 1): (0.1, 0.1), (PP, 8): (0.0, 0.2)})
    policy = Copus(profile, [8, 16])
    decision = policy.decide(observe(Configuration(PP, 8, 1), noise_scale=10.0))
    assert Configuration(PP, 8, 8) not in [c.configuration for c in decision.candidates]
    assert decision.configuration == Configuration(PP, 16, 8)
