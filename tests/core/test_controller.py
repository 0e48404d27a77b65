from __future__ import annotations

import json
import random
from typing import Any

import pytest

from copus_lightning.core.controller import TIME_KINDS, Controller
from copus_lightning.core.goodput import statistical_efficiency
from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.noise import NoiseScaleTracker, StepNorms
from copus_lightning.core.policy import Copus, Decision, Observation, Policy, Ramp, Static
from copus_lightning.core.profile import Measurement, Profile
from copus_lightning.core.records import METRICS

DP, PP = Layout(data=2), Layout(pipeline=2)
SEQUENCE = 32  # target tokens per sample
START = Configuration(PP, 4, 1)
CURVES = {(PP, 1): (0.2, 0.07), (DP, 1): (0.6, 0.1)}  # alpha and beta, s


class Scripted(Policy):
    """Gives the decisions it was given, and keeps what it was told."""

    def __init__(self, *decisions: Configuration | None) -> None:
        self.decisions = list(decisions)
        self.told: list[Observation] = []
        self.observed: list[tuple[Configuration, float]] = []
        self.failures: list[tuple[Configuration, str]] = []

    def decide(self, observation: Observation) -> Decision:
        self.told.append(observation)
        return Decision(self.decisions.pop(0) if self.decisions else None, "as scripted")

    def observe(self, configuration: Configuration, step_seconds: float) -> None:
        self.observed.append((configuration, step_seconds))

    def failed(self, configuration: Configuration, reason: str) -> None:
        self.failures.append((configuration, reason))

    def switch_seconds(self) -> float | None:
        return 7.0


def norms_of(configuration: Configuration, noise_scale: float, n_tokens: int) -> StepNorms:
    """Norms whose estimate is |G|^2 = 1 and tr(Sigma) = noise_scale, exactly."""
    n_micro = configuration.layout.data * configuration.accumulation
    batch = configuration.global_batch_size
    mean_sq_norm = 1 + noise_scale / batch
    scatter = noise_scale / batch * n_tokens * (n_micro - 1)
    return StepNorms(scatter + n_tokens * mean_sq_norm, mean_sq_norm, n_micro, n_tokens, batch)


def make_step(controller: Controller, configuration: Configuration, **fields: Any) -> dict[str, Any]:
    samples = configuration.global_batch_size
    known = {"n_samples": samples, "n_target_tokens": samples * SEQUENCE, "step_seconds": 0.5, "loss": 3.0}
    return controller.observe_step(configuration=configuration, **{**known, **fields})


def controller_of(policy: Policy, every: int = 4 * SEQUENCE, **fields: Any) -> Controller:
    return Controller(policy, NoiseScaleTracker(half_life_samples=64), every, **fields)


def test_a_step_gives_the_row_of_what_core_knows() -> None:
    controller = controller_of(Static(), critical_batch_coefficient=2.0)
    row = make_step(controller, START, norms=norms_of(START, 6.0, 4 * SEQUENCE))
    assert set(METRICS) - set(row) == {"val_loss", "grad_norm", "learning_rate"}
    assert set(row) <= set(METRICS)
    assert (row["step"], row["samples"], row["tokens"]) == (1, 4, 4 * SEQUENCE)
    assert (row["layout"], row["global_batch_size"], row["micro_batch_size"]) == ("dp1-tp1-pp2", 4, 1)
    assert row["accumulation"] == 4
    assert row["noise_scale"] == pytest.approx(6.0)
    assert row["noise_trace"] == pytest.approx(6.0) and row["noise_sq_norm"] == pytest.approx(1.0)
    assert row["samples_per_second"] == 8.0
    assert row["tokens_per_second"] == 8.0 * SEQUENCE
    assert row["goodput_realised"] == pytest.approx(8.0 * 12 / 16)
    assert row["goodput_predicted"] is None, "this policy predicts nothing"
    assert row["learning_rate_factor"] == 1.0
    json.dumps(row)


def test_predicted_goodput_follows_the_corrected_profile() -> None:
    profile = Profile({}, {}, 2, [Measurement(PP, 1, n, 0.1 * n) for n in (1, 2, 4)])
    controller = controller_of(Copus(profile, [4]), settle_steps=1)
    norms = norms_of(START, 6.0, 4 * SEQUENCE)
    first = make_step(controller, START, norms=norms)
    efficiency = statistical_efficiency(4, 6.0, 2.0)
    assert first["goodput_predicted"] == pytest.approx(10.0 * efficiency)
    make_step(controller, START, norms=norms)
    assert profile.correction(PP, 1) == pytest.approx(0.5 / 0.4)
    last = make_step(controller, START, norms=norms)
    assert last["goodput_predicted"] == pytest.approx(last["goodput_realised"])


def test_first_steps_after_a_change_do_not_correct_the_profile() -> None:
    policy = Scripted()
    controller = controller_of(policy, settle_steps=2)
    for seconds in (9.0, 8.0, 1.0, 1.1):
        make_step(controller, START, step_seconds=seconds)
    assert policy.observed == [(START, 1.0), (START, 1.1)]
    after = Configuration(DP, 4, 1)
    controller.applied(after, switch_seconds=1.0)
    for seconds in (7.0, 6.0, 2.0):
        make_step(controller, after, step_seconds=seconds)
    assert policy.observed[2:] == [(after, 2.0)]


def test_unmeasured_steps_age_the_noise_averages() -> None:
    controller = controller_of(Static())
    row = make_step(controller, START)
    assert row["noise_scale"] is None and row["goodput_realised"] is None
    make_step(controller, START, norms=norms_of(START, 6.0, 4 * SEQUENCE))
    for _ in range(16):  # one half-life of 64 samples, this step among them
        make_step(controller, START, norms=None)
    row = make_step(controller, START, norms=norms_of(START, 12.0, 4 * SEQUENCE))
    decay = 0.5 ** (17 * 4 / 64)
    assert row["noise_scale"] == pytest.approx((6 * decay + 12) / (decay + 1))


def test_the_policy_is_asked_every_so_many_tokens() -> None:
    policy = Scripted()
    controller = controller_of(policy, every=10 * SEQUENCE)
    assert not controller.due()
    asked = []
    for step in range(1, 13):
        make_step(controller, START)
        if controller.due():
            asked.append(step)
            assert controller.decide().configuration is None
            assert not controller.due()
    assert asked == [3, 6, 9, 12]


def test_no_decision_while_one_is_pending() -> None:
    there = Configuration(PP, 8, 1)
    controller = controller_of(Scripted(there, None))
    make_step(controller, START)
    assert controller.decide().configuration == there
    assert controller.pending == there
    make_step(controller, START)
    assert not controller.due()
    with pytest.raises(AssertionError, match="pending"):
        controller.decide()
    controller.applied(there)
    assert controller.pending is None and controller.due()


def test_changes_are_counted_and_their_cost_is_learned() -> None:
    policy = Scripted()
    controller = controller_of(policy)
    make_step(controller, START)
    controller.decide(remaining_seconds=99.0)
    told = policy.told[-1]
    assert told == Observation(START, None, 4 * SEQUENCE, 4, 1, 0.5, 7.0, 99.0, None)

    controller.applied(Configuration(PP, 8, 1), switch_seconds=0.25)
    assert (controller.layout_switches, controller.batch_changes) == (0, 1)
    assert controller.observation().switch_seconds == 7.0, "a batch change says nothing of a layout's cost"
    controller.applied(Configuration(DP, 8, 1), switch_seconds=4.0)
    assert (controller.layout_switches, controller.batch_changes) == (1, 1)
    assert controller.observation().switch_seconds == 4.0
    assert controller.observation().tokens_since_layout_switch == 0
    controller.applied(Configuration(PP, 16, 2), switch_seconds=2.0)
    assert (controller.layout_switches, controller.batch_changes) == (2, 2)
    assert controller.observation().switch_seconds == 3.0
    controller.applied(Configuration(PP, 16, 1))
    assert (controller.layout_switches, controller.batch_changes) == (2, 2), "a micro-batch is neither"
    make_step(controller, Configuration(PP, 16, 1))
    assert controller.observation().tokens_since_layout_switch == 16 * SEQUENCE
    assert controller.seconds_switching == 6.25
    assert controller.seconds_total == 7.25
    assert controller.first_configuration == START


def test_a_failed_change_leaves_the_run_where_it_was_and_cools_down() -> None:
    there = Configuration(DP, 8, 2)
    policy = Scripted(there)
    controller = controller_of(policy)
    make_step(controller, START)
    controller.decide()
    controller.failed(there, "out of memory", switch_seconds=1.5)
    assert controller.pending is None
    assert controller.configuration == START
    assert policy.failures == [(there, "out of memory")]
    assert (controller.switch_failures, controller.layout_switches, controller.batch_changes) == (1, 0, 0)
    assert controller.seconds_switching == 1.5
    assert controller.observation().tokens_since_layout_switch == 0
    controller.failed(Configuration(PP, 16, 8), "out of memory")
    make_step(controller, START)
    assert controller.observation().tokens_since_layout_switch == 4 * SEQUENCE


def test_time_sums_to_the_whole() -> None:
    controller = controller_of(Static())
    make_step(controller, START, step_seconds=2.0)
    for seconds, kind in enumerate(TIME_KINDS):
        controller.add_seconds(kind, float(seconds))
    assert controller.seconds_total == 2.0 + sum(range(len(TIME_KINDS)))
    assert controller.summary()["seconds_total"] == sum(controller.summary()["seconds"].values())


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt", "surge"])
def test_the_learning_rate_factor_never_compounds(rule: str) -> None:
    def fresh() -> Controller:
        return controller_of(Static(), learning_rate_rule=rule, reference_batch_size=8)

    draw = random.Random(0)
    expected: dict[int, float] = {}
    controller = fresh()
    assert controller.learning_rate_factor == 1.0
    for _ in range(200):
        now = Configuration(draw.choice([PP, DP]), draw.choice([4, 8, 16, 32]), draw.choice([1, 2]))
        controller.applied(now)
        row = make_step(controller, now, norms=norms_of(now, 6.0, now.global_batch_size * SEQUENCE))
        make_step(controller, now)
        here = controller.learning_rate_factor
        assert expected.setdefault(now.global_batch_size, here) == pytest.approx(here)
        if row["step"] > 1:
            assert row["learning_rate_factor"] == pytest.approx(here)
        if draw.random() < 0.3:
            saved = json.loads(json.dumps(controller.state_dict()))
            controller = fresh()
            controller.load_state_dict(saved)
            assert controller.learning_rate_factor == here
    assert expected[8] == pytest.approx(1.0)


def test_the_first_batch_is_the_reference_and_stays_so_over_resumes() -> None:
    controller = controller_of(Static(), configuration=START)
    assert controller.reference_batch_size == 4
    controller.applied(Configuration(PP, 16, 1))
    assert controller.learning_rate_factor == 2.0
    resumed = controller_of(Static(), configuration=Configuration(PP, 16, 1))
    resumed.load_state_dict(controller.state_dict())
    assert resumed.learning_rate_factor == 2.0
    told = controller_of(Static(), reference_batch_size=16)
    told.load_state_dict(controller.state_dict())
    assert told.learning_rate_factor == 1.0, "what the user sets is a setting, not state"


def real_run(controller: Controller, steps: range, draw: random.Random) -> list[dict[str, Any]]:
    rows = []
    for _ in steps:
        now = controller.configuration or START
        norms = norms_of(now, 200 * draw.random(), now.global_batch_size * SEQUENCE)
        alpha, beta = CURVES[now.layout, now.micro_batch_size]
        seconds = (alpha + now.accumulation * beta) * draw.uniform(0.9, 1.1)
        rows.append(make_step(controller, now, norms=norms, step_seconds=seconds))
        if controller.due():
            decision = controller.decide(remaining_seconds=1000.0)
            if decision.configuration is not None:
                controller.applied(decision.configuration, draw.uniform(0.1, 0.3))
    return rows


def copus_controller() -> Controller:
    points = [Measurement(*pair, n, a + n * b) for pair, (a, b) in CURVES.items() for n in (1, 4, 16)]
    policy = Copus(Profile({}, {}, 2, points), [4, 8, 16, 32], cooldown_tokens=8 * SEQUENCE)
    return controller_of(policy, every=8 * SEQUENCE, settle_steps=0)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    whole, first, second = copus_controller(), copus_controller(), copus_controller()
    draws = random.Random(1), random.Random(1)
    expected = real_run(whole, range(60), draws[0])
    found = real_run(first, range(25), draws[1])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += real_run(second, range(35), draws[1])
    assert found == expected
    assert second.state_dict() == whole.state_dict()
    assert second.summary() == whole.summary()
    assert whole.batch_changes > 0 and whole.layout_switches > 0


def test_a_pending_decision_does_not_survive_a_resume_but_is_asked_anew_at_once() -> None:
    controller = controller_of(Scripted(Configuration(PP, 8, 1)), every=100 * SEQUENCE)
    for _ in range(25):
        make_step(controller, START)
    controller.decide()
    resumed = controller_of(Scripted(), every=100 * SEQUENCE)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.pending is None and resumed.due()


def test_a_resume_in_another_place_or_with_another_policy() -> None:
    controller = copus_controller()
    make_step(controller, START)
    controller.failed(Configuration(DP, 4, 1), "out of memory")
    elsewhere = Configuration(DP, 8, 1)
    resumed = controller_of(Ramp("0:4"))
    resumed.load_state_dict(controller.state_dict(), configuration=elsewhere)
    assert resumed.configuration == elsewhere
    assert resumed.first_configuration == START
    assert (resumed.layout_switches, resumed.batch_changes, resumed.step) == (0, 0, 1)
    make_step(resumed, elsewhere)
    with pytest.raises(ValueError, match="tracker") as error:
        resumed.load_state_dict({k: v for k, v in controller.state_dict().items() if k != "tracker"})
    assert "\n" not in str(error.value)


def test_summary_is_what_the_run_leaves() -> None:
    controller = controller_of(Static(), configuration=START)
    make_step(controller, START, norms=norms_of(START, 6.0, 4 * SEQUENCE))
    controller.applied(Configuration(DP, 8, 2), 1.5)
    summary = json.loads(json.dumps(controller.summary()))
    assert summary["first_configuration"] == START.to_dict()
    assert summary["final_configuration"] == {
        "layout": "dp2-tp1-pp1", "global_batch_size": 8, "micro_batch_size": 2
    }  # fmt: skip
    assert (summary["steps"], summary["tokens"], summary["samples"]) == (1, 4 * SEQUENCE, 4)
    assert (summary["seconds_total"], summary["seconds_switching"]) == (2.0, 1.5)
    assert (summary["layout_switches"], summary["batch_changes"]) == (1, 1)
    assert summary["noise_scale_last"] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"every": 0}, "decide_every_tokens"),
        ({"reference_batch_size": 0}, "reference_batch_size"),
        ({"learning_rate_rule": "root"}, "learning_rate_rule='root'"),
        ({"critical_batch_coefficient": 0}, "critical_batch_coefficient"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        controller_of(Static(), **fields)
    assert "\n" not in str(error.value)


def test_a_start_that_the_policy_cannot_work_from_is_refused() -> None:
    profile = Profile({}, {}, 2, [Measurement(PP, 1, 1, 0.1)])
    with pytest.raises(ValueError, match="dp2-tp1-pp1 batch 4"):
        controller_of(Copus(profile, [4]), configuration=Configuration(DP, 4, 1))
