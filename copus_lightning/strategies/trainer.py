"""Trainer's strategy: the same session over the same engine as Fabric's, behind Trainer's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import ReduceOp
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.data.loader import ElasticDataLoader
from copus_lightning.strategies.lightning_module import (
    NO_CLIPPING_BY_VALUE,
    WholeWeights,
    language_model,
    refuse_unsupported,
)
from copus_lightning.strategies.loop_lengths import batches_before, follow_loaders, resume_epoch
from copus_lightning.strategies.precision import wanted_dtype
from copus_lightning.strategies.processes import DEFAULT_TIMEOUT_SECONDS, Processes
from copus_lightning.strategies.session import Options, Session
from copus_lightning.strategies.trainer_checkpoints import TrainerCheckpoints
from copus_lightning.strategies.trainer_launcher import CheckingLauncher


class CopusTrainerStrategy(TrainerCheckpoints):
    """Trains the language model of a LightningModule with data, tensor and pipeline parallelism.

    The LightningModule is an ordinary one: ``training_step`` returns the loss of ``self.model(**batch)``,
    ``configure_optimizers`` one optimizer with or without a scheduler. Once these are configured, its one
    submodule that is a Hugging Face model is replaced by a stand-in with the same call, whose output has the
    ``loss`` alone: in training, after the whole pipelined forward and backward of an optimizer step over this
    data rank's samples; in validation the loss over all data ranks. One batch of the loader is one optimizer
    step, whatever its size.

    ``self.log(…, sync_dist=True)`` reduces over the data ranks, whatever the layout: tensor and pipeline
    peers, which have the same samples, count once.

    Args:
        layout: As for :class:`copus_lightning.CopusStrategy`, and so are all of the following.
        global_batch_size: Samples per optimizer step to begin with.
        micro_batch_size: Samples per forward and backward of one data rank.
        zero_stage: 1 shards masters and moments over the data ranks, 0 does not.
        gradient_clip_norm: Largest global gradient norm; ``Trainer(gradient_clip_val=…)`` works too.
        cache_groups: Keep process groups of layouts that were left, for a cheap return.
        buffer_bytes: Size of the buffer through which state travels in a switch.
        timeout_seconds: Longest wait for another rank.
        process_group_backend: ``"nccl"`` or ``"gloo"``; default by device.
        seed: Of the order of samples; default: the one of ``seed_everything``, else 0.
        async_save: A save copies the state to host memory and returns; a helper thread writes it while training
            goes on. An error is raised by the next save.

    ``ModelCheckpoint``, ``trainer.save_checkpoint`` and ``trainer.fit(ckpt_path=…)`` work as with any strategy,
    see docs/checkpoints.md: a checkpoint is a folder that any layout and any number of ranks can load. With
    ``save_weights_only=True`` it is a file of the whole fp32 weights under the names that they have in the
    LightningModule.

    Raises:
        ValueError: The layout does not fit the number of devices; raised before any process is launched.
    """

    def __init__(
        self,
        layout: Layout | str | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int = 1,
        zero_stage: int = 1,
        gradient_clip_norm: float | None = None,
        cache_groups: bool = True,
        buffer_bytes: int = 64 * 2**20,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        process_group_backend: str | None = None,
        seed: int | None = None,
        async_save: bool = False,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.dtype = torch.float32
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        options = Options(
            layout=Layout.parse(layout) if isinstance(layout, str) else layout,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            zero_stage=zero_stage,
            gradient_clip_norm=gradient_clip_norm,
            cache_groups=cache_groups,
            buffer_bytes=buffer_bytes,
            timeout_seconds=timeout_seconds,
            seed=seed,
            async_save=async_save,
        )
        self.session = Session(options)
        self.timeout_seconds = timeout_seconds
        self.process_group_backend = process_group_backend
        self._learning_rate_of_step = 0.0
        self._weights: WholeWeights | None = None
        self._obsolete: list[_PATH] = []

    # -- what users call -------------------------------------------------------------------------------------

    @property
    def configuration(self) -> Configuration:
        """Layout, global batch and micro-batch of the next step."""
        assert self.session.configuration is not None, "the processes are not launched yet"
        return self.session.configuration

    def switch(self, configuration: Configuration) -> Any:
        """As :meth:`copus_lightning.CopusStrategy.switch`; not to be called between batch and update."""
        return self.session.switch_for_script(configuration)

    @property
    def learning_rate_of_step(self) -> float:
        """The user's rate (of the first param group) in the step just made, before the scheduler moved on."""
        return self._learning_rate_of_step

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Read by Lightning: without it, ``self.log(…, sync_dist=True)`` would not reduce."""
        return True

    def set_world_ranks(self) -> None:
        """Called by Lightning once it has set devices and cluster environment."""
        self._set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.session.options.first_configuration(self.planned_world_size)  # refuses before anything starts
        # Also where another launcher has made the processes: then it checks alone.
        self._launcher = CheckingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        refuse_unsupported(model.trainer, model)
        # Samples are chosen by global position; a sampler of Lightning's would shard them a second time.
        model.trainer._accelerator_connector.use_distributed_sampler = False
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.connect_processes()
        if self.session.configuration is not None:  # a fit() before this one
            self.session = Session(self.session.options)
        self.session.start(self.global_rank, self.world_size)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or EnginePrecision(self, "32-true")

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None stays None: Trainer takes a plugin that a strategy has for its precision, over its own argument.
        self._precision_plugin = None
        if precision_plugin is not None:
            self.dtype = wanted_dtype(precision_plugin)
            self._precision_plugin = EnginePrecision(self, precision_plugin.precision)

    # -- model and data --------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        names, model = language_model(self.lightning_module)
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(f"configure_optimizers: return one optimizer, not {len(self.optimizers)}")
        self._weights = WholeWeights(names, model)
        facade = self.session.set_up(model, self.optimizers[0], self.root_device, self.dtype)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(self.lightning_module.get_submodule(parent), leaf, facade)
        rank_zero_info(
            f"{type(model).__name__} with {self._weights.n_parameters:,} parameters in {self.configuration} "
            "(a model summary counts its stand-in)"
        )
        self.model_to_device()
        self.session.on_switched = lambda: follow_loaders(trainer, self.session.train_loader, stepped=True)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Moves what is left in the LightningModule, such as metrics; the engine places the shards."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.training and self.session.train_loader is not None:
            raise ValueError("train_dataloaders: pass one DataLoader, several have no common order")
        loader = self.session.wrap_loader(dataloader, trainer.training)  # type: ignore[arg-type]
        if isinstance(loader, ElasticDataLoader):
            loader.count_from(batches_before(trainer))
        return loader

    # -- step ------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        resume_epoch(self.lightning_module.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        follow_loaders(self.lightning_module.trainer, self.session.train_loader)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        model = model or self.lightning_module
        assert isinstance(model, pl.LightningModule)
        # Training step and backward, then the hooks before the optimizer step, clipping among them.
        result = self.precision_plugin._wrap_closure(model, optimizer, closure)  # type: ignore[arg-type]
        self._learning_rate_of_step = float(optimizer.param_groups[0]["lr"])
        self.session.update()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
        return result

    # -- collectives -----------------------------------------------------------------------------------------

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        sums = reduce_op in (ReduceOp.SUM, "sum")
        if sums and group is None and isinstance(tensor, Tensor) and self.session.configuration is not None:
            at = self.session.configuration.layout.coordinates(self.global_rank)
            tensor = tensor if at.tensor == at.pipeline == 0 else torch.zeros_like(tensor)
        return self.all_reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = self.all_reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        Processes.barrier(self, name)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return Processes.broadcast(self, obj, src)

    @override
    def teardown(self) -> None:
        # Not the base's: it would move the module to the CPU, which fails for one that is still on meta.
        assert self.cluster_environment is not None and self.accelerator is not None
        with self.replacing():
            self.session.close()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class EnginePrecision(Precision):
    """Leaves numbers to the engine, without autocast or a cast on top, and hands it the clipping.

    Args:
        strategy: Whose session clips.
        precision: What the user wished, to be read by others.
    """

    def __init__(self, strategy: CopusTrainerStrategy, precision: Any) -> None:
        self.strategy = strategy
        self.precision = precision

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.strategy.session.clip(float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        raise ValueError(NO_CLIPPING_BY_VALUE)
