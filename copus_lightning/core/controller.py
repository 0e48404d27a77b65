"""The run's bookkeeping: what was observed, when a policy is asked, what is remembered.

A state machine with no clock, rank or tensor in it. Seconds and norms come in as numbers; the one thing that
goes out and changes anything is a `Decision`:

    observe_step -> due? -> decide -> (pending) -> applied | failed -> observe_step -> ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from copus_lightning.core.decision import Decision, Observation, Policy
from copus_lightning.core.goodput import DEFAULT_COEFFICIENT, goodput
from copus_lightning.core.layout import Configuration
from copus_lightning.core.learning_rate import Rule, check_rule, factor
from copus_lightning.core.noise import NoiseScaleTracker, StepNorms, estimate

# Where wall time goes; the parts sum to it.
TIME_KINDS = ("productive", "switching", "checkpointing", "data", "evaluation", "other")

_COUNTERS = ("step", "tokens", "samples", "layout_switches", "batch_changes", "switch_failures")


class Controller:
    """Counts, asks the policy when it is due, and remembers across resumes.

    Args:
        policy: Decides; also learns from step times and failures.
        tracker: Smooths the noise scale.
        decide_every_tokens: Target tokens between two questions to the policy.
        learning_rate_rule: See `learning_rate.factor`.
        reference_batch_size: The global batch at which the user tuned the learning rate; None for the first
            one of the run.
        critical_batch_coefficient: c, for the efficiency in the recorded Goodput and for the `surge` rule.
        configuration: Where the run starts, if known already: the policy may refuse it.
        settle_steps: Steps after the start and after every change of configuration whose time says nothing
            (first allocations, caches, communicators): recorded, but not used to correct the profile.

    Attributes:
        step: Optimizer steps.
        tokens: Target tokens (positions with a loss) trained on. With samples the counter of record.
        samples: Samples trained on.
        seconds: Wall seconds by kind, see `TIME_KINDS`.
        layout_switches: Changes of layout.
        batch_changes: Changes of the global batch, those made with a layout among them.
        switch_failures: Changes that failed.
        configuration: What runs now, None before it is known.
        first_configuration: What the run started in.
        pending: A decision's configuration that is neither applied nor failed yet.

    Raises:
        ValueError: If a setting is not valid, or the policy refuses the configuration.
    """

    def __init__(
        self,
        policy: Policy,
        tracker: NoiseScaleTracker,
        decide_every_tokens: int,
        learning_rate_rule: Rule = "sqrt",
        reference_batch_size: int | None = None,
        *,
        critical_batch_coefficient: float = DEFAULT_COEFFICIENT,
        configuration: Configuration | None = None,
        settle_steps: int = 1,
    ) -> None:
        if not decide_every_tokens > 0:
            raise ValueError(f"decide_every_tokens must be positive, got {decide_every_tokens!r}")
        if reference_batch_size is not None and not reference_batch_size > 0:
            raise ValueError(f"reference_batch_size must be positive, or none, got {reference_batch_size!r}")
        if not critical_batch_coefficient > 0:
            raise ValueError(
                f"critical_batch_coefficient must be positive, got {critical_batch_coefficient!r}"
            )
        check_rule(learning_rate_rule)
        if configuration is not None:
            policy.check(configuration)
        self.policy = policy
        self.tracker = tracker
        self.decide_every_tokens = decide_every_tokens
        self.learning_rate_rule = learning_rate_rule
        self.reference_batch_size = reference_batch_size
        self._user_reference = reference_batch_size is not None
        self.critical_batch_coefficient = critical_batch_coefficient
        self.settle_steps = settle_steps

        self.step = 0
        self.tokens = 0
        self.samples = 0
        self.seconds = dict.fromkeys(TIME_KINDS, 0.0)
        self.layout_switches = 0
        self.batch_changes = 0
        self.switch_failures = 0
        self.configuration: Configuration | None = None
        self.first_configuration: Configuration | None = None
        self.pending: Configuration | None = None
        self._next_decision_tokens = decide_every_tokens
        self._layout_switch_tokens: int | None = None  # when the last one was tried
        self._layout_switch_seconds: float | None = None  # what one costs here
        self._settling = settle_steps
        if configuration is not None:
            self._enter(configuration)

    # -- numbers going up ------------------------------------------------------------------------------------

    def observe_step(
        self,
        *,
        configuration: Configuration,
        n_samples: int,
        n_target_tokens: int,
        step_seconds: float,
        loss: float | None,
        norms: StepNorms | None = None,
    ) -> dict[str, Any]:
        """Take in one optimizer step.

        Args:
            configuration: What the step ran in.
            n_samples: Samples that it consumed, over all data ranks.
            n_target_tokens: Positions with a loss among them.
            step_seconds: Wall time between the ends of the last step and of this one, without what is
                reported by `add_seconds` and `applied`.
            loss: Mean over the target tokens of the global batch; None if not known on this rank.
            norms: None on steps where they were not measured.

        Returns:
            The step's row of metrics.csv, but for the columns that only the engine knows (see
            `records.METRICS`). The noise columns are the smoothed averages after this step. Both Goodputs are
            in useful samples per second, `T * SE(B)` whatever the policy's objective: predicted from the
            corrected profile, realised from this step's time; None while the noise scale or the prediction is
            not known.
        """
        assert step_seconds > 0 and n_samples >= 0 and n_target_tokens >= 0
        self._enter(configuration)
        learning_rate_factor = self.learning_rate_factor  # what the step used: of before its own measurement
        self.step += 1
        self.tokens += n_target_tokens
        self.samples += n_samples
        self.seconds["productive"] += step_seconds
        noise = None if norms is None else estimate(norms)
        if noise is not None:
            self.tracker.update(noise)
        else:
            self.tracker.skip(n_samples)

        noise_scale = self.tracker.noise_scale
        samples_per_second = n_samples / step_seconds
        predicted = self.policy.throughput(configuration)
        if self._settling > 0:
            self._settling -= 1
        else:
            self.policy.observe(configuration, step_seconds)

        def useful(throughput: float | None) -> float | None:
            if throughput is None or noise_scale is None:
                return None
            batch, coefficient = configuration.global_batch_size, self.critical_batch_coefficient
            return goodput(throughput, batch, noise_scale, coefficient)

        return {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.samples,
            "seconds": self.seconds_total,
            "step_seconds": step_seconds,
            "loss": loss,
            **configuration.to_dict(),
            "accumulation": configuration.accumulation,
            "noise_scale": noise_scale,
            "noise_trace": self.tracker.trace,
            "noise_sq_norm": self.tracker.sq_norm,
            "goodput_predicted": useful(predicted),
            "goodput_realised": useful(samples_per_second),
            "samples_per_second": samples_per_second,
            "tokens_per_second": n_target_tokens / step_seconds,
            "learning_rate_factor": learning_rate_factor,
        }

    def add_seconds(self, kind: str, seconds: float) -> None:
        """Account for wall time outside steps and switches: a kind of `TIME_KINDS`."""
        assert kind in self.seconds and seconds >= 0, (kind, seconds)
        self.seconds[kind] += seconds

    @property
    def seconds_total(self) -> float:
        """Wall seconds of the run, resumed parts included."""
        return sum(self.seconds.values())

    @property
    def seconds_switching(self) -> float:
        """Wall seconds spent in changes of configuration, failed ones among them."""
        return self.seconds["switching"]

    @property
    def noise_scale(self) -> float | None:
        """Smoothed phi in samples, None while it is not known."""
        return self.tracker.noise_scale

    @property
    def learning_rate_factor(self) -> float:
        """Factor on the user's learning rate for the present batch; 1 before there is one."""
        if self.configuration is None or self.reference_batch_size is None:
            return 1.0
        return factor(
            self.learning_rate_rule,
            self.configuration.global_batch_size,
            self.reference_batch_size,
            self.tracker.noise_scale,
            self.critical_batch_coefficient,
        )

    # -- the command going down ------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether the policy should be asked now: enough tokens have passed, and no decision is pending."""
        return (
            self.pending is None
            and self.configuration is not None
            and self.tokens >= self._next_decision_tokens
        )

    def observation(self, remaining_seconds: float | None = None) -> Observation:
        """What the policy would be told now."""
        assert self.configuration is not None, "nothing has run yet"
        expected = self._layout_switch_seconds
        if expected is None:
            expected = self.policy.switch_seconds()
        since = None if self._layout_switch_tokens is None else self.tokens - self._layout_switch_tokens
        return Observation(
            configuration=self.configuration,
            noise_scale=self.tracker.noise_scale,
            tokens=self.tokens,
            samples=self.samples,
            step=self.step,
            seconds=self.seconds_total,
            switch_seconds=expected or 0.0,
            remaining_seconds=remaining_seconds,
            tokens_since_layout_switch=since,
        )

    def decide(self, remaining_seconds: float | None = None) -> Decision:
        """Ask the policy. A decision to move is pending until `applied` or `failed`; meanwhile none is made.

        Args:
            remaining_seconds: Until the run ends, None if not known.
        """
        assert self.pending is None, f"a decision is pending: {self.pending}"
        decision = self.policy.decide(self.observation(remaining_seconds))
        self._next_decision_tokens = self.tokens + self.decide_every_tokens
        self.pending = decision.configuration
        return decision

    def applied(self, configuration: Configuration, switch_seconds: float | None = None) -> None:
        """The run is in `configuration` now, decided here or by the user.

        Args:
            configuration: The new configuration.
            switch_seconds: How long training stood still for it.
        """
        before, self.pending = self.configuration, None
        self.seconds["switching"] += switch_seconds or 0.0
        if before is not None and configuration.layout != before.layout:
            self.layout_switches += 1
            self._layout_switch_tokens = self.tokens
            if switch_seconds is not None:
                # The latest counts half: a first switch pays for set-up that later ones find done.
                known = self._layout_switch_seconds
                self._layout_switch_seconds = (
                    switch_seconds if known is None else (known + switch_seconds) / 2
                )
        if before is not None and configuration.global_batch_size != before.global_batch_size:
            self.batch_changes += 1
        self._enter(configuration)

    def failed(self, configuration: Configuration, reason: str, switch_seconds: float | None = None) -> None:
        """The run could not enter, or cannot stay in, `configuration`; it is where it was.

        Args:
            configuration: What failed; the policy does not choose it again.
            reason: One line for people.
            switch_seconds: How long training stood still for the attempt.
        """
        self.pending = None
        self.switch_failures += 1
        self.seconds["switching"] += switch_seconds or 0.0
        self.policy.failed(configuration, reason)
        if self.configuration is not None and configuration.layout != self.configuration.layout:
            self._layout_switch_tokens = self.tokens  # an attempt cools down like a switch
            self._settling = self.settle_steps  # and coming back rebuilds as much

    def _enter(self, configuration: Configuration) -> None:
        if configuration == self.configuration:
            return
        self.configuration = configuration
        self._settling = self.settle_steps
        if self.first_configuration is None:
            self.first_configuration = configuration
        if self.reference_batch_size is None:
            self.reference_batch_size = self.first_configuration.global_batch_size

    # -- what is kept ----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """The part of summary.json that core knows."""
        return {
            "tokens": self.tokens,
            "samples": self.samples,
            "steps": self.step,
            "seconds_total": self.seconds_total,
            "seconds_switching": self.seconds_switching,
            "seconds": dict(self.seconds),
            "layout_switches": self.layout_switches,
            "batch_changes": self.batch_changes,
            "switch_failures": self.switch_failures,
            "first_configuration": _plain(self.first_configuration),
            "final_configuration": _plain(self.configuration),
            "noise_scale_last": self.tracker.noise_scale,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types. Settings are not state: a resumed run takes them from its own configuration."""
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "seconds": dict(self.seconds),
            "configuration": _plain(self.configuration),
            "first_configuration": _plain(self.first_configuration),
            "reference_batch_size": self.reference_batch_size,
            # Nobody is left to apply a pending decision after a resume: the policy is asked anew, at once.
            "next_decision_tokens": self.tokens if self.pending is not None else self._next_decision_tokens,
            "layout_switch_tokens": self._layout_switch_tokens,
            "layout_switch_seconds": self._layout_switch_seconds,
            "tracker": self.tracker.state_dict(),
            "policy_kind": type(self.policy).__name__,
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], configuration: Configuration | None = None) -> None:
        """Go on from `state_dict`. What another kind of policy has learned is left out.

        Args:
            state: What `state_dict` gave.
            configuration: Where the resumed run is, if that is not where the saved one was. Going there is
                not counted as a change.

        Raises:
            ValueError: If a key is missing or unknown.
        """
        odd = ", ".join(sorted(set(state) ^ set(self.state_dict())))
        if odd:
            raise ValueError(
                f"controller state was not written by this version: missing or unknown keys {odd}"
            )
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        self.seconds = {kind: float(state["seconds"].get(kind, 0.0)) for kind in TIME_KINDS}
        first = state["first_configuration"]
        self.first_configuration = None if first is None else Configuration.from_dict(first)
        # Else the factor would start from 1 again: the saved reference stands, unless the user set one.
        if not self._user_reference:
            self.reference_batch_size = state["reference_batch_size"]
        self.pending = None
        self._next_decision_tokens = state["next_decision_tokens"]
        self._layout_switch_tokens = state["layout_switch_tokens"]
        self._layout_switch_seconds = state["layout_switch_seconds"]
        self.tracker.load_state_dict(state["tracker"])
        if state["policy_kind"] == type(self.policy).__name__:
            self.policy.load_state_dict(state["policy"])
        if configuration is None and state["configuration"] is not None:
            configuration = Configuration.from_dict(state["configuration"])
        self.configuration = None
        if configuration is not None:
            self._enter(configuration)


def _plain(configuration: Configuration | None) -> dict[str, Any] | None:
    return None if configuration is None else configuration.to_dict()
