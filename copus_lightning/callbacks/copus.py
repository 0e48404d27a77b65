"""The COPUS callback: one class for Fabric and Trainer over one :class:`Conductor`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from copus_lightning.callbacks.conductor import Conductor, Row, on_rank_zero
from copus_lightning.core.controller import Controller
from copus_lightning.core.goodput import DEFAULT_COEFFICIENT
from copus_lightning.core.layout import Configuration
from copus_lightning.core.learning_rate import Rule
from copus_lightning.core.noise import NoiseScaleTracker
from copus_lightning.core.policy import Copus, CriticalBatch, Policy, Ramp, Static
from copus_lightning.core.profile import Profile
from copus_lightning.core.records import RunRecorder
from copus_lightning.engine.fingerprint import hardware_fingerprint, model_fingerprint
from copus_lightning.strategies.session import Session


class CopusCallback(Callback):
    """Lets a run choose its own global batch, micro-batch and 3D-parallel layout while it trains.

    Goes with :class:`copus_lightning.CopusStrategy` under Fabric and with
    :class:`copus_lightning.CopusTrainerStrategy` under Trainer. After each optimizer step it takes in the step's
    time and squared gradient norms; every ``decide_every_tokens`` it asks the policy, and switches.

    Args:
        profile: Measured throughput, as a :class:`Profile` or the path of a file that ``copus profile`` wrote.
            Needed by the policy ``copus``.
        global_batch_sizes: Batches to choose among, samples.
        policy: ``"copus"`` (best Goodput), ``"critical_batch"`` (batch follows c·φ, layout fixed), ``"ramp"``,
            ``"static"`` (observe only), or a policy object.
        objective: ``"goodput"`` or ``"lr_aware"``; see docs/policies.md.
        critical_batch_coefficient: c, of critical batch = c·φ.
        threshold: Least relative gain in Goodput worth a layout change.
        batch_threshold: The same for a batch or micro-batch alone, which costs nothing.
        max_batch_growth: Largest growth of the batch per decision, a factor; None: any.
        decide_every_tokens: Target tokens between decisions.
        cooldown_tokens: Target tokens without another layout change after one.
        dwell_seconds: How long a new layout has to pay for the switch; None: the rest of the run.
        allow_layout: False: the batch alone changes.
        ramp: For the policy ``ramp``: ``"0:768 250B:1536 1T:3072"``, from how many tokens on which batch.
        noise_half_life_samples: Half-life of the noise scale's averages, samples.
        measure_cost_fraction: Largest share of time, on average, spent on measuring the noise scale.
        learning_rate_rule: ``"sqrt"``, ``"linear"``, ``"surge"``, ``"none"`` or a function of B / B_ref. The
            factor is applied inside the strategy: the user's optimizer and schedulers never see it.
        reference_batch_size: B_ref, the batch at which the learning rate was tuned; default: the first.
        run_dir: Folder for ``metrics.csv`` and ``events.jsonl``; None writes none. Under Trainer what a module
            logs as ``val_loss`` is recorded as the validation loss.
        log_every_steps: Steps between two records to Lightning's loggers.

    Logged keys (all from rank 0, step = optimizer steps), when known:

    | key                          | meaning                                                    |
    |------------------------------|------------------------------------------------------------|
    | ``copus/loss``               | mean over the target tokens of the global batch, nats      |
    | ``copus/noise_scale``        | φ = noise_trace / noise_sq_norm, samples                    |
    | ``copus/noise_trace``        | tr(Σ) per sample, smoothed                                  |
    | ``copus/noise_sq_norm``      | squared norm of the true gradient, smoothed                |
    | ``copus/grad_norm``          | global gradient norm before clipping                       |
    | ``copus/global_batch_size``  | samples per optimizer step                                 |
    | ``copus/micro_batch_size``   | samples per forward of a data rank                         |
    | ``copus/accumulation``       | micro-batches per step and data rank                       |
    | ``copus/data_parallel``, ``copus/tensor_parallel``, ``copus/pipeline_parallel`` | the layout's sizes |
    | ``copus/samples_per_second``, ``copus/tokens_per_second`` | of the whole world            |
    | ``copus/goodput_predicted``, ``copus/goodput_realised`` | useful samples per second       |
    | ``copus/learning_rate``, ``copus/learning_rate_factor`` | what the step used              |
    | ``copus/tokens``, ``copus/samples``, ``copus/seconds``  | counters of record              |

    Raises:
        ValueError: A setting is not valid, or the profile is of another model or machine.
    """

    def __init__(
        self,
        profile: Profile | str | os.PathLike[str] | None = None,
        global_batch_sizes: Iterable[int] = (),
        policy: str | Policy = "copus",
        objective: str = "goodput",
        critical_batch_coefficient: float = DEFAULT_COEFFICIENT,
        threshold: float = 0.10,
        batch_threshold: float = 0.02,
        max_batch_growth: float | None = 2.0,
        decide_every_tokens: int = 16_384,
        cooldown_tokens: int = 32_768,
        dwell_seconds: float | None = 60.0,
        allow_layout: bool = True,
        ramp: str | None = None,
        noise_half_life_samples: float = 256.0,
        measure_cost_fraction: float = 0.01,
        learning_rate_rule: Rule = "sqrt",
        reference_batch_size: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        log_every_steps: int = 10,
    ) -> None:
        self.profile = Profile.load(profile) if isinstance(profile, (str, os.PathLike)) else profile
        self.global_batch_sizes = tuple(sorted(global_batch_sizes))
        if isinstance(policy, Policy):
            self.policy = policy
        elif policy == "copus":
            if self.profile is None:
                raise ValueError(
                    "policy='copus' needs a throughput profile: measure one with `copus profile` and pass "
                    "profile='profile.json', or choose policy='critical_batch'"
                )
            self.policy = Copus(
                self.profile,
                self.global_batch_sizes,
                objective=objective,
                critical_batch_coefficient=critical_batch_coefficient,
                threshold=threshold,
                batch_threshold=batch_threshold,
                max_batch_growth=max_batch_growth,
                cooldown_tokens=cooldown_tokens,
                dwell_seconds=dwell_seconds,
                allow_layout=allow_layout,
            )
        elif policy == "critical_batch":
            self.policy = CriticalBatch(
                self.profile, self.global_batch_sizes, critical_batch_coefficient, max_batch_growth
            )
        elif policy == "ramp":
            if not ramp:
                raise ValueError("policy='ramp' needs a ramp, like ramp='0:64 10M:128 100M:256'")
            self.policy = Ramp(ramp, self.profile)
        elif policy == "static":
            self.policy = Static()
        else:
            raise ValueError(f"policy={policy!r} is not known: use copus, critical_batch, ramp or static")
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.log_every_steps = log_every_steps
        self.measure_cost_fraction = measure_cost_fraction
        self.controller = Controller(
            self.policy,
            NoiseScaleTracker(noise_half_life_samples),
            decide_every_tokens,
            learning_rate_rule,
            reference_batch_size,
            critical_batch_coefficient=critical_batch_coefficient,
        )
        self.conductor: Conductor | None = None
        self.last_row: Row = {}
        self._loggers: list[Any] = []
        self._validation_started = 0.0

    # -- what a script may use ---------------------------------------------------------------------------------

    @property
    def _live(self) -> Conductor:
        if self.conductor is None:
            raise RuntimeError("the callback is not connected: pass it to Fabric or Trainer before setup()")
        return self.conductor

    @property
    def recorder(self) -> RunRecorder | None:
        """Writes the run directory; on rank 0 alone."""
        return self._live.recorder

    @property
    def remaining_seconds(self) -> float | None:
        """How long the run will go on, if known: a switch must pay for itself within it."""
        return self._live.remaining_seconds

    @remaining_seconds.setter
    def remaining_seconds(self, seconds: float | None) -> None:
        self._live.remaining_seconds = seconds

    def account(self, kind: str) -> AbstractContextManager[None]:
        """Books a block's wall time as ``evaluation``, ``checkpointing``, ``data`` or ``other``, not as training."""
        return self._live.account(kind)

    def record_validation(self, val_loss: float) -> None:
        """Records a validation loss, nats per target token."""
        self._live.record_validation(val_loss)

    def summary(self) -> Row:
        """Counters, seconds by kind, first and present configuration."""
        return self._live.summary()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.conductor is None:
            self.controller.load_state_dict(state_dict, None)
            return
        session = self.conductor.session
        self.controller.load_state_dict(state_dict, session.configuration)
        if self._enter_known(session):
            self.controller.load_state_dict(state_dict, session.configuration)
        session.learning_rate_factor = self.controller.learning_rate_factor

    def _enter_known(self, session: Session) -> bool:
        """Leaves a micro-batch of which the policy knows nothing for one that it knows, if there is one.

        Returns:
            Whether it went to another one.
        """
        loaded = session.configuration
        assert loaded is not None
        sizes = [m for m in range(loaded.data_rank_batch_size, 0, -1) if loaded.data_rank_batch_size % m == 0]
        for micro in (loaded.micro_batch_size, *sizes):
            configuration = replace(loaded, micro_batch_size=micro)
            try:
                self.policy.check(configuration)
            except ValueError:
                continue
            if configuration != loaded:
                session.switch(configuration)
            return configuration != loaded
        rank_zero_warn(
            f"{loaded}, in which the checkpoint was saved, is not known to the policy: it will stay there"
        )
        return False

    # -- set-up ------------------------------------------------------------------------------------------------

    def connect(self, strategy: Any, loggers: list[Any]) -> None:
        """Ties the callback to a strategy whose engine is ready. All ranks."""
        session: Session | None = getattr(strategy, "session", None)
        if not isinstance(session, Session):
            raise ValueError(
                f"CopusCallback needs strategy=CopusStrategy(...) (Fabric) or CopusTrainerStrategy(...) (Trainer), "
                f"not {type(strategy).__name__}"
            )
        self._loggers = loggers
        self._check_profile(session)
        self._choose_first_batch(session)
        assert session.configuration is not None
        self.policy.check(session.configuration)
        self.controller.applied(session.configuration)
        self.conductor = Conductor(
            session,
            self.controller,
            strategy.broadcast,
            on_rank_zero(strategy.global_rank, self.run_dir),
            self.measure_cost_fraction,
        )

    def _check_profile(self, session: Session) -> None:
        if self.profile is None:
            return
        engine = session.live
        # The sequence length is not known before the first batch.
        length = self.profile.model.get("sequence_length")
        self.profile.check(
            model=model_fingerprint(engine, length),
            hardware=hardware_fingerprint(engine.device),
            world_size=engine.world_size,
        )

    def _choose_first_batch(self, session: Session) -> None:
        """Begins with the smallest batch that fits the layout, unless the strategy was given one."""
        assert session.configuration is not None
        if session.options.global_batch_size is not None or not self.global_batch_sizes:
            return
        layout, micro = session.configuration.layout, session.configuration.micro_batch_size
        fitting = [b for b in self.global_batch_sizes if b % (layout.data * micro) == 0]
        if not fitting:
            raise ValueError(
                f"global_batch_sizes={list(self.global_batch_sizes)}: none divides by {layout.data} data ranks "
                f"times micro-batches of {micro}; add a multiple of {layout.data * micro}"
            )
        session.switch(Configuration(layout, fitting[0], micro))

    def _after_step(self, learning_rate: float) -> None:
        self.last_row = self._live.after_step(learning_rate)
        if self.controller.step % self.log_every_steps == 0:
            self._log(self.last_row)

    def _log(self, row: Row) -> None:
        if not self._loggers:
            return
        layout = self._live.session.live.layout
        sizes = {
            "data_parallel": layout.data,
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": layout.pipeline,
        }
        numbers = {k: v for k, v in {**row, **sizes}.items() if isinstance(v, (int, float)) and k != "step"}
        metrics = {f"copus/{k}": v for k, v in numbers.items()}
        for logger in self._loggers:
            logger.log_metrics(metrics, step=self.controller.step)

    # -- Fabric ------------------------------------------------------------------------------------------------

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Called by ``fabric.setup``."""
        self.connect(fabric.strategy, list(fabric.loggers))

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Called by Fabric after each ``optimizer.step()``."""
        self._after_step(float(optimizer.param_groups[0]["lr"]))

    # -- Trainer -----------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Not on_train_start: by then Trainer has asked the loader for its length under the first batch.
        self.connect(trainer.strategy, list(trainer.loggers))

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._after_step(trainer.strategy.learning_rate_of_step)

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation_started = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.conductor is None:
            return
        self.conductor.book("evaluation", time.perf_counter() - self._validation_started)
        val_loss = trainer.callback_metrics.get("val_loss")
        if val_loss is not None and not trainer.sanity_checking:
            self.conductor.record_validation(float(val_loss))
