"""Fabric's strategy: 3D-parallel DeepSpeed that can be taken down and rebuilt between two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.strategies.precision import wanted_dtype
from copus_lightning.strategies.processes import DEFAULT_TIMEOUT_SECONDS, Processes
from copus_lightning.strategies.session import Options, Session


class CopusStrategy(Processes, ParallelStrategy):
    """Trains a Hugging Face causal language model with data, tensor and pipeline parallelism under Fabric.

    One call of the model runs the whole pipelined forward and backward of an optimizer step over this data
    rank's samples, micro-batch by micro-batch; ``optimizer.step()`` is the update. Between two steps
    :meth:`switch` moves the run to another configuration, with weights and optimizer state, in memory.

    Args:
        layout: Where to begin, as ``"dp4-tp1-pp2"`` or a :class:`Layout`; default: data parallelism alone.
        global_batch_size: Samples per optimizer step to begin with; default: the callback's smallest, without a
            callback the DataLoader's ``batch_size`` times the data ranks.
        micro_batch_size: Samples per forward and backward of one data rank.
        zero_stage: 1 shards masters and moments over the data ranks, 0 does not.
        gradient_clip_norm: Largest global gradient norm; ``fabric.clip_gradients(max_norm=…)`` works too.
        cache_groups: Keep process groups of layouts that were left, for a cheap return.
        buffer_bytes: Size of the buffer through which state travels in a switch.
        timeout_seconds: Longest wait for another rank.
        process_group_backend: ``"nccl"`` or ``"gloo"``; default by device.
        seed: Of the order of samples; default: the one of ``seed_everything``, else 0.

    The first loader that is set up is the training loader: it yields this data rank's samples of one optimizer
    step and follows every switch. Later ones are for validation: they run over every sample once, in order.

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
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Precision | None = None,
    ) -> None:
        self.dtype = torch.float32
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
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
        )
        self.session = Session(options)
        self.timeout_seconds = timeout_seconds
        self.process_group_backend = process_group_backend
        self._backward_sync_control: _BackwardSyncControl | None = None

    # -- what users call ---------------------------------------------------------------------------------------

    @property
    def configuration(self) -> Configuration:
        """Layout, global batch and micro-batch of the next step."""
        assert self.session.configuration is not None, "the processes are not launched yet"
        return self.session.configuration

    def switch(self, configuration: Configuration) -> Any:
        """Moves the run to another configuration, between two optimizer steps, on all ranks.

        Returns:
            A :class:`copus_lightning.engine.engine.SwitchReport`: seconds of each phase and bytes moved.

        Raises:
            ValueError: The configuration does not fit the model or the world; nothing was changed.
        """
        return self.session.switch(configuration)

    # -- processes ---------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.session.options.first_configuration(
            self.planned_world_size
        )  # refuses before anything is launched
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.connect_processes()
        self.session.start(self.global_rank, self.world_size)

    @property
    @override
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        # The engine does it all: no autocast and no cast of the user's module on top of it.
        if precision is not None:
            self.dtype = wanted_dtype(precision)
        self._precision = Precision()

    # -- model and data ----------------------------------------------------------------------------------------

    @override
    def module_to_device(self, module: Module) -> None:
        """The engine places each shard itself."""

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        if len(optimizers) != 1:
            raise ValueError(f"CopusStrategy takes one optimizer for all parameters, not {len(optimizers)}")
        facade = self.session.set_up(module, optimizers[0], self.root_device, self.dtype)
        return facade, optimizers, scheduler

    @override
    def setup_module(self, module: Module) -> Module:
        raise ValueError(
            "CopusStrategy shards the optimizer with the model: call fabric.setup(model, optimizer) in one go"
        )

    @override
    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        training = self.session.train_loader is None
        return self.session.wrap_loader(dataloader, training)  # type: ignore[return-value]

    # -- step --------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure: Callable[[], Any] | None = kwargs.get("closure")
        result = closure() if closure is not None else None
        self.session.update()
        optimizer._opt_called = True  # what torch's schedulers look for
        return result

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported: CopusStrategy clips by the 2-norm")
        # A step with a gradient that is not finite changes nothing, so there is no error to raise here.
        return self.session.clip(float(max_norm)).float()

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        raise ValueError("clipping by value is not supported: use fabric.clip_gradients(..., max_norm=…)")

    # -- collectives -------------------------------------------------------------------------------------------

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return Processes.all_reduce(self, tensor, group, reduce_op)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        Processes.barrier(self, *args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return Processes.broadcast(self, obj, src)

    @override
    def teardown(self) -> None:
        self.session.close()
        super().teardown()
