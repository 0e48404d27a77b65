"""What the two Lightning faces share: an engine, the loaders that follow it, and the step between them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.data.evaluation import EvaluationLoader
from copus_lightning.data.loader import ElasticDataLoader

if TYPE_CHECKING:
    from copus_lightning.engine.checkpoint import Checkpointer
    from copus_lightning.engine.engine import Engine, Reduction, StepOutcome, SwitchReport


@dataclass(frozen=True)
class Options:
    """What a user may set on either strategy; see :class:`copus_lightning.CopusStrategy`."""

    layout: Layout | str | None = None
    global_batch_size: int | None = None
    micro_batch_size: int = 1
    zero_stage: int = 1
    gradient_clip_norm: float | None = None
    cache_groups: bool = True
    buffer_bytes: int = 64 * 2**20
    timeout_seconds: float = 1800.0
    seed: int | None = None
    async_save: bool = False

    def first_layout(self, world_size: int) -> Layout:
        """The layout to begin with: data parallelism alone unless one is given.

        Raises:
            ValueError: It does not fit the world size.
        """
        if self.layout is None:
            return Layout(data=world_size)
        layout = Layout.parse(self.layout) if isinstance(self.layout, str) else self.layout
        layout.check(world_size=world_size)
        return layout

    def first_configuration(self, world_size: int) -> Configuration:
        """Where a run begins if nothing else chooses the batch.

        Raises:
            ValueError: The layout does not fit the world size, or the batch does not divide.
        """
        layout = self.first_layout(world_size)
        batch = self.global_batch_size or layout.data * self.micro_batch_size
        return Configuration(layout, batch, self.micro_batch_size)


class Session:
    """Drives one engine for a strategy.

    Attributes:
        engine: None before the model is set up.
        train_loader: The loader that follows the configuration, or None.
        outcome: Of the last optimizer step.
        loss: Of the last forward pass, 0-d.
        step_seconds: Seconds that the last optimizer step spent in forward, backward and update.
        learning_rate_factor: Multiplies the user's learning rate in the next step.
        on_switched: Called after each switch, once engine and loader have followed.
        switch_for_script: What a switch that the script asks for goes through; the callback books and records it.
        book: Called with a kind (of :data:`copus_lightning.core.controller.TIME_KINDS`) and seconds of wall time
            that are no part of a step.
        data_state: Where to go on in the data, for a training loader that is still to come.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.engine: Engine | None = None
        self.configuration: Configuration | None = None
        self.train_loader: ElasticDataLoader | None = None
        self.outcome: StepOutcome | None = None
        self.loss: torch.Tensor | None = None
        self.step_seconds = 0.0
        self.learning_rate_factor = 1.0
        self.sequence_length: int | None = None
        self.on_switched: Callable[[], None] = lambda: None
        self.switch_for_script: Callable[[Configuration], SwitchReport] = self.switch
        self.book: Callable[[str, float], None] = lambda kind, seconds: None
        self.data_state: dict[str, Any] | None = None
        self._checkpointer: Checkpointer | None = None
        self._batch_chosen = options.global_batch_size is not None
        self._scales: list[torch.Tensor] = []
        self._rank = 0

    # -- set-up ------------------------------------------------------------------------------------------------

    def start(self, rank: int, world_size: int) -> None:
        """Chooses the first configuration, once ranks are known."""
        self._rank = rank
        self.configuration = self.options.first_configuration(world_size)

    @property
    def seed(self) -> int:
        """Of the order of samples and of weights made on ``meta``."""
        if self.options.seed is not None:
            return self.options.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def set_up(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, dtype: torch.dtype
    ) -> Facade:
        """Builds the engine around the user's model and optimizer; returns what takes the model's place."""
        from copus_lightning.engine.engine import Engine, EngineSettings

        if self.engine is not None:
            raise ValueError("a model was set up already: CopusStrategy trains one model with one optimizer")
        assert self.configuration is not None, "the processes are not launched yet"
        settings = EngineSettings(
            zero_stage=self.options.zero_stage,
            dtype=dtype,
            gradient_clip_norm=self.options.gradient_clip_norm,
            cache_groups=self.options.cache_groups,
            buffer_bytes=self.options.buffer_bytes,
            ranks_per_node=_ranks_per_node(),
            timeout_seconds=self.options.timeout_seconds,
        )
        self.engine = Engine(model, optimizer, self.configuration, settings, device, self.seed)
        return Facade(self, getattr(model, "config", None))

    def wrap_loader(self, dataloader: DataLoader, training: bool) -> ElasticDataLoader | EvaluationLoader:
        """The loader in the user's place: of the global batch for training, of every sample for validation.

        Raises:
            ValueError: It is not a DataLoader, or cannot be sampled by position.
        """
        if not isinstance(dataloader, DataLoader):
            raise ValueError(
                f"dataloader: a {type(dataloader).__name__} cannot be sampled by position; wrap a map-style "
                "dataset in a torch DataLoader"
            )
        if not training:
            return EvaluationLoader(dataloader, self._data_place)
        assert self.configuration is not None
        if not self._batch_chosen:
            batch = (dataloader.batch_size or 1) * self.configuration.layout.data
            self.configuration = Configuration(self.configuration.layout, batch, self._fitting_micro(batch))
            if self.engine is not None:
                self.engine.switch(self.configuration)
        rank, size = self._data_place()
        self.train_loader = ElasticDataLoader(
            dataloader, rank, size, self.configuration.global_batch_size, self.seed
        )
        if self.data_state is not None:
            self.train_loader.load_state_dict(self.data_state)
            self.data_state = None
        return self.train_loader

    def _fitting_micro(self, global_batch_size: int) -> int:
        assert self.configuration is not None
        per_rank = global_batch_size // self.configuration.layout.data
        micro = self.options.micro_batch_size
        if per_rank % micro:
            raise ValueError(
                f"micro_batch_size={micro} does not divide the {per_rank} samples that the DataLoader's batch_size "
                "gives each data rank: set it to a divisor, or set global_batch_size of the strategy"
            )
        return micro

    def _data_place(self) -> tuple[int, int]:
        assert self.configuration is not None
        layout = self.configuration.layout
        return layout.coordinates(self._rank).data, layout.data

    # -- one step ----------------------------------------------------------------------------------------------

    @property
    def live(self) -> Engine:
        """The engine, once there is one.

        Raises:
            RuntimeError: The model has not been set up.
        """
        if self.engine is None:
            raise RuntimeError("no model was set up: call fabric.setup(model, optimizer) first")
        return self.engine

    def forward(self, batch: Mapping[str, torch.Tensor], training: bool) -> CausalLMOutput:
        """Forward (and, in training, backward) of one step; the loss is the mean over the global batch."""
        if not training:
            with self.naming_lost_rank():
                total, n_tokens = self.live.evaluate(batch)
            return CausalLMOutput(loss=(total / n_tokens.clamp(min=1)).float())
        started = time.perf_counter()
        self.sequence_length = batch["input_ids"].shape[1]
        self.loss = self.live.step(batch)
        self._scales.clear()
        self.configuration = self.live.configuration  # its micro-batch is smaller if memory was short
        self.step_seconds = time.perf_counter() - started
        anchor = torch.zeros((), device=self.loss.device, requires_grad=True)
        return CausalLMOutput(loss=_RecordScale.apply(anchor, self.loss, self._scales))

    def take_reductions(self) -> list[Reduction]:
        """Micro-batches that ran out of memory since the last call."""
        taken, self.live.reductions = self.live.reductions, []
        return taken

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips this step's gradient to a global norm; returns the norm before clipping.

        Both are of the loss whose backward pass was run, with whatever it was multiplied with.
        """
        with self.naming_lost_rank():
            return self.live.clip(max_norm) * abs(self._scale())

    def _scale(self) -> float:
        return float(sum(s.item() for s in self._scales))

    def update(self) -> StepOutcome:
        """The optimizer step.

        Raises:
            RuntimeError: The loss had no backward pass.
        """
        started = time.perf_counter()
        if not self._scales:
            raise RuntimeError(
                "the optimizer was stepped without a backward pass of the model's loss: call "
                "fabric.backward(loss) before optimizer.step(), or return the loss from training_step"
            )
        with self.naming_lost_rank():
            self.outcome = self.live.update(self._scale(), self.learning_rate_factor)
        self._scales.clear()
        if self.train_loader is not None:
            self.train_loader.in_hand = 0
        self.step_seconds += time.perf_counter() - started
        return self.outcome

    def switch(self, configuration: Configuration) -> SwitchReport:
        """Goes to another configuration: engine first, then the loader."""
        report = self.live.switch(configuration)
        self.configuration, self._batch_chosen = configuration, True
        if self.train_loader is not None:
            rank, size = self._data_place()
            self.train_loader.reconfigure(
                data_rank=rank, data_size=size, global_batch_size=configuration.global_batch_size
            )
        self.on_switched()
        return report

    # -- a rank that is gone -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def naming_lost_rank(self) -> Iterator[None]:
        """Finds out who is gone, if all that an error in the block says is that a connection broke.

        Such errors come from collectives between the phases that the ranks agree on, like those of the optimizer.
        Every rank that is left gets one.

        Raises:
            RankLost: Names the rank.
        """
        try:
            yield
        except RuntimeError as error:
            self._name_lost_rank(error)
            raise

    def _name_lost_rank(self, error: RuntimeError) -> None:
        if self.engine is None or hasattr(error, "described"):
            return
        from copus_lightning.engine.failures import CONNECTION, CollectiveError, classify, forget_tracebacks

        if isinstance(error, CollectiveError):
            return
        error.described = True  # type: ignore[attr-defined]  # a block around this one need not ask again
        failure = classify(error, self._rank)
        if failure.kind != CONNECTION:
            return
        traceback = error.__traceback__
        forget_tracebacks(error)
        try:
            self.engine.agreement.agree("training", failure)
        finally:
            error.__traceback__ = traceback

    # -- checkpoints, see :mod:`copus_lightning.strategies.checkpoints` ----------------------------------------

    @property
    def checkpointer(self) -> Checkpointer:
        """Of the engine."""
        if self._checkpointer is None:
            from copus_lightning.engine.checkpoint import Checkpointer

            self._checkpointer = Checkpointer(self.live)
        return self._checkpointer

    def go_on(self, configuration: Configuration, data_state: dict[str, Any] | None) -> None:
        """Takes up a saved run: its batch, and its place in the data. The engine has its state already.

        Args:
            configuration: Of the present layout.
            data_state: Of the training loader; None if there was none.
        """
        if configuration != self.configuration:
            self.switch(configuration)
        self._batch_chosen = True
        if data_state is not None and self.train_loader is not None:
            self.train_loader.load_state_dict(data_state)
        else:
            self.data_state = data_state

    def saved_data_state(self) -> dict[str, Any] | None:
        """Where a resumed run has to go on in the data: a batch in the script's hand was not trained on yet."""
        loader = self.train_loader
        if loader is None:
            return self.data_state
        return {**loader.state_dict(), "position": loader.position - loader.in_hand}

    def finish_saving(self) -> None:
        """Waits until a checkpoint that is being written is complete. Collective."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Ends the engine, once a checkpoint that is being written is complete."""
        try:
            if self._checkpointer is not None:
                self._checkpointer.close()
        finally:
            self._checkpointer = None
            if self.engine is not None:
                self.engine.close()
                self.engine = None


class _RecordScale(torch.autograd.Function):
    """Lets a loss whose backward pass has run already be scaled: records the gradient that reaches it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, record: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.record = record
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.record.append(gradients[0].detach())
        return torch.zeros_like(gradients[0]), None, None


class Facade(nn.Module):
    """Stands where the model stood: a call runs the whole pipelined forward and backward of a step.

    Attributes:
        config: The model's.
    """

    session: Session

    def __init__(self, session: Session, config: Any = None) -> None:
        super().__init__()
        object.__setattr__(self, "session", session)
        self.config = config

    def forward(self, input_ids: torch.Tensor, **batch: torch.Tensor) -> CausalLMOutput:
        """Takes what the Hugging Face model takes; returns an output with the ``loss`` alone.

        In training mode with gradients enabled: this data rank's samples of one optimizer step; the loss is the
        token mean over the global batch. In evaluation mode or without gradients: the loss over all data ranks'
        batches, and nothing is changed.
        """
        training = self.training and torch.is_grad_enabled()
        return self.session.forward({"input_ids": input_ids, **batch}, training)


def _ranks_per_node() -> int | None:
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None
