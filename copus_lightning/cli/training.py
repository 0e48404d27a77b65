"""The training loop of `copus fit`: an ordinary Fabric loop, with validation, limits and records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

from copus_lightning.callbacks import CopusCallback
from copus_lightning.callbacks.preemption import Preemption
from copus_lightning.cli.building import build_model, build_optimizer
from copus_lightning.cli.checkpoints import Keeper
from copus_lightning.cli.progress import RunView
from copus_lightning.config import Config
from copus_lightning.core.records import read_events
from copus_lightning.data import TokenDataset, unigram_entropy
from copus_lightning.engine.checkpoint_format import complete_ones, damaged_ones


class Training:
    """One run from set-up to its last validation. Collective, but for what says otherwise.

    Args:
        config: The run.
        fabric: Launched, with `copus` among its callbacks.
        copus: Measures, decides, switches and records.
        datasets: For training and validation.
        resume: The checkpoint to go on from, or None.

    Attributes:
        val_loss: Of the last validation, nats per target token.
        ended_by: `max_tokens`, `max_seconds`, `target_loss` or `preemption`, once the run has ended.
    """

    def __init__(
        self,
        config: Config,
        fabric: Any,
        copus: CopusCallback,
        datasets: tuple[TokenDataset, TokenDataset],
        resume: Path | None = None,
    ) -> None:
        self.config, self.fabric, self.copus = config, fabric, copus
        self.run_dir = Path(config.run.run_dir)
        self.train_data, self.val_data = datasets
        model = build_model(config.model)
        optimizer = build_optimizer(model, config.optimizer)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.loader = fabric.setup_dataloaders(self._training_loader())
        elastic = fabric.strategy.session.train_loader
        # The strategy's own seed is that of the weights.
        elastic.load_state_dict({**elastic.state_dict(), "seed": config.data.seed})
        self.val_loader = fabric.setup_dataloaders(self._validation_loader())
        schedule = config.token_schedule
        # The tokens at the end of the step that the rate is for: so the first step has one above 0.
        self.scheduler = LambdaLR(optimizer, lambda _: schedule(copus.controller.tokens + self._step_tokens))
        self.val_loss = math.nan
        self.ended_by: str | None = None
        self.save_failure: str | None = None
        self.view = RunView(config, fabric.is_global_zero)
        self._clock = _SharedClock(fabric, copus)
        self.keeper = Keeper(config, fabric.is_global_zero)
        if resume is not None:
            self._load(resume)

    def _training_loader(self) -> DataLoader:
        workers = self.config.data.num_workers
        return DataLoader(
            self.train_data,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.fabric.device.type == "cuda",
        )

    def _validation_loader(self) -> DataLoader:
        """The same samples at every validation, evenly spread over the held-out data.

        Their number is that of so many of the largest global batches, whatever the present one is.
        """
        config = self.config
        largest = max([config.parallel.global_batch_size, *config.copus.global_batch_sizes])
        n = min(config.run.validation_batches * largest, len(self.val_data))
        chosen = [position * len(self.val_data) // n for position in range(n)]
        micro = max([config.parallel.micro_batch_size, *config.copus.micro_batch_sizes])
        # Some micro-batches at a time keep the stages of a pipeline busy; a layout has few data ranks then.
        return DataLoader(Subset(self.val_data, chosen), batch_size=min(4 * micro, n))

    @property
    def _step_tokens(self) -> int:
        """Target tokens of the next step."""
        return self.fabric.strategy.configuration.global_batch_size * (self.config.data.sequence_length - 1)

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains until a limit is reached, or until SIGTERM asks to save and leave."""
        run, controller = self.config.run, self.copus.controller
        batches = self._batches()
        next_validation = (controller.tokens // run.validate_every_tokens + 1) * run.validate_every_tokens
        validated_at = -1
        with self.view, Preemption(self.fabric.strategy.session) as preemption:
            self.ended_by = self._limit() if controller.step else None
            while self.ended_by is None:
                self._step(next(batches))
                if controller.tokens >= next_validation:
                    self._validate()
                    validated_at = controller.tokens
                    next_validation = (
                        validated_at // run.validate_every_tokens + 1
                    ) * run.validate_every_tokens
                self.ended_by = self._limit()
                if self.ended_by is None and preemption.requested():
                    self.ended_by = "preemption"
                elif self.keeper.due(controller.tokens) and self.ended_by is None:
                    self._save_if_possible()
            if self.ended_by == "preemption":
                self._save_if_possible()
                return
            if validated_at != controller.tokens:
                self._validate()
            if run.checkpoint_every_tokens is not None:
                self._save_if_possible()

    def _batches(self) -> Iterator[Any]:
        """Without end; the wait for them is booked as such."""
        while True:
            epoch = iter(self.loader)
            while True:
                with self.copus.account("data"):
                    batch = next(epoch, None)
                if batch is None:
                    break
                yield batch

    def _step(self, batch: Any) -> None:
        before = self.fabric.strategy.configuration
        self.copus.remaining_seconds = self._remaining_seconds()
        loss = self.model(**batch).loss
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        now = self.fabric.strategy.configuration
        if self.view.shown:
            self.view.step(self.copus.last_row, now)
            if now != before:
                decisions = read_events(self.run_dir, "decision")
                reason = decisions[-1]["reason"] if decisions else ""
                self.view.switched(self.copus.last_row, before, now, reason)

    def _validate(self) -> None:
        with self.copus.account("evaluation"):
            total, n_tokens = 0.0, 0.0
            for batch in self.val_loader:
                summed, counted = self.fabric.strategy.session.live.evaluate(batch)
                total, n_tokens = total + summed.item(), n_tokens + counted.item()
        self.val_loss = total / n_tokens
        self.copus.record_validation(self.val_loss)
        for logger in self.fabric.loggers if self.fabric.is_global_zero else []:
            logger.log_metrics({"copus/val_loss": self.val_loss}, step=self.copus.controller.step)
        self.view.validated(self.copus.last_row, self.val_loss)

    # -- checkpoints -----------------------------------------------------------------------------------------

    @property
    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds, besides the batch, the place in the data and the random generators."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "copus": self.copus,
            "val_loss": self.val_loss,
            "last_row": self.copus.last_row,
        }

    def _save(self) -> None:
        path = self.keeper.path(self.copus.controller.step)
        self.fabric.save(path, self._state)
        self._event("checkpoint", path=str(path))
        self.keeper.remove_old(path)

    def _save_if_possible(self) -> None:
        """A disk that is full, or a file in the way, does not end the run: the checkpoint before is there."""
        from copus_lightning.engine.checkpoint import CheckpointFailed

        try:
            self._save()
            self.save_failure = None
        except (CheckpointFailed, ValueError) as error:  # the same on all ranks
            self.save_failure = str(error)
            self._event("checkpoint_failed", reason=self.save_failure)
            self.view.note(self.copus.last_row, self.save_failure)

    def _load(self, path: Path) -> None:
        """Goes on from a checkpoint; one that `auto` has found may turn out to be damaged, then from the one before."""
        from copus_lightning.engine.checkpoint import REFUSALS

        older: list[Path] = []
        if self.config.run.resume == "auto":
            older = self.fabric.broadcast([p for p in complete_ones(path.parent) if p != path])
            for damaged, reason in damaged_ones(path.parent).items():
                self._refused(damaged, reason)
        first_refusal: Exception | None = None
        for candidate in (path, *older):
            try:
                self._load_one(candidate)
                return
            except REFUSALS as error:
                reason = " ".join(str(error.args[0]).split())
                self._refused(candidate, reason)
                first_refusal = first_refusal or error
        assert first_refusal is not None
        raise first_refusal

    def _refused(self, path: Path, reason: str) -> None:
        self.keeper.damaged.add(path.absolute())
        self._event("checkpoint_refused", path=str(path), reason=reason)
        self.view.note(self.copus.last_row, reason)

    def _load_one(self, path: Path) -> None:
        state, session, controller = self._state, self.fabric.strategy.session, self.copus.controller
        chosen = session.configuration
        self.fabric.load(path, state)
        self.val_loss, self.copus.last_row = state["val_loss"], state["last_row"]
        if self.config.copus.policy == "static" and session.configuration != chosen:
            # Then the word of the configuration file counts, not that of the checkpoint.
            session.switch(chosen)
            controller.applied(chosen)
            session.learning_rate_factor = controller.learning_rate_factor
        self.keeper.start_at(controller.tokens)
        self._event("resumed", path=str(path), **session.configuration.to_dict())
        self.view.note(self.copus.last_row, f"goes on from {path} in {session.configuration}")

    def _event(self, kind: str, **fields: Any) -> None:
        controller, recorder = self.copus.controller, self.copus.recorder
        if recorder is not None:
            recorder.event(kind, step=controller.step, tokens=controller.tokens, **fields)

    # -- limits ----------------------------------------------------------------------------------------------

    def _limit(self) -> str | None:
        run = self.config.run
        if run.target_loss is not None and self.val_loss <= run.target_loss:
            return "target_loss"
        if run.max_tokens is not None and self.copus.controller.tokens >= run.max_tokens:
            return "max_tokens"
        if run.max_seconds is not None and self._clock.seconds() >= run.max_seconds:
            return "max_seconds"
        return None

    def _remaining_seconds(self) -> float | None:
        """Until the run ends by time or, at the pace so far, by tokens; on the first rank it counts."""
        run, controller = self.config.run, self.copus.controller
        limits = []
        if run.max_seconds is not None:
            limits.append(run.max_seconds - controller.seconds_total)
        if run.max_tokens is not None and controller.tokens:
            pace = controller.seconds_total / controller.tokens
            limits.append(pace * (run.max_tokens - controller.tokens))
        return max(0.0, min(limits)) if limits else None

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self, profiling_seconds: float) -> None:
        """Writes the summary, draws, and prints. First rank alone."""
        from copus_lightning.plots import draw_run

        entropy = None
        preempted = self.ended_by == "preemption"  # there may be seconds left only
        if not preempted and self.config.data.kind != "tokens":  # which may be too large to read as a whole
            entropy = unigram_entropy(self.val_data)
        summary = {
            **self.copus.summary(),
            "final_val_loss": self.val_loss,
            "final_train_loss": self.copus.last_row["loss"],
            "unigram_entropy": entropy,
            "ended_by": self.ended_by,
            "seconds_profiling": profiling_seconds,
            "world_size": self.fabric.world_size,
            "sequence_length": self.config.data.sequence_length,
        }
        recorder = self.copus.recorder
        assert recorder is not None
        recorder.event("end", step=summary["steps"], tokens=summary["tokens"], ended_by=self.ended_by)
        recorder.summary(summary)
        for logger in self.fabric.loggers:
            logger.finalize("success")
        if preempted:
            if self.save_failure is None:
                self.view.note(self.copus.last_row, "pre-empted: go on with run.resume=auto")
            return
        drawn = draw_run(self.run_dir, self.config.copus.critical_batch_coefficient)
        self.view.summary(summary, self.run_dir, drawn)


class _SharedClock:
    """The first rank's clock, read by all at the same steps: about twice a second, not at every step."""

    def __init__(self, fabric: Any, copus: CopusCallback) -> None:
        self.fabric, self.copus = fabric, copus
        self._seconds, self._steps_left = 0.0, 0

    def seconds(self) -> float:
        """Wall seconds of the run when it was last read. Collective."""
        if self._steps_left > 0:
            self._steps_left -= 1
            return self._seconds
        controller = self.copus.controller
        step_seconds = self.copus.last_row["step_seconds"]
        mine = (controller.seconds_total, min(100, int(0.5 / step_seconds)))
        self._seconds, self._steps_left = self.fabric.broadcast(mine)
        return self._seconds
