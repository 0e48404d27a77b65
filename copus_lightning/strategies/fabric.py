"""Fabric's strategy: 3D-parallel DeepSpeed that can be taken down and rebuilt between two optimizer steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.types import _PATH, _Stateful
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.strategies import checkpoints
from copus_lightning.strategies.launchers import WatchingLauncher
from copus_lightning.strategies.precision import wanted_dtype
from copus_lightning.strategies.processes import DEFAULT_TIMEOUT_SECONDS, Processes
from copus_lightning.strategies.session import Facade, Options, Session


class EnginePrecision(Precision):
    """Leaves numbers to the engine: no autocast and no cast of the user's module on top of it.

    Args:
        precision: What the user wished, to be read by others.
    """

    def __init__(self, precision: Any) -> None:
        self.precision = precision


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
        async_save: ``fabric.save`` copies the state to host memory and returns; a helper thread writes it while
            training goes on. An error is raised by the next ``fabric.save`` or ``fabric.load``.

    ``fabric.save`` and ``fabric.load`` work as with any strategy, see docs/checkpoints.md: a checkpoint is a
    folder that any layout and any number of ranks can load.

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
        async_save: bool = False,
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
            async_save=async_save,
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
            SwitchFailed: Some rank failed; all are in the old configuration, with bit-identical state.
        """
        return self.session.switch_for_script(configuration)

    # -- processes ---------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.session.options.first_configuration(
            self.planned_world_size
        )  # refuses before anything is launched
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = WatchingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

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
        # None stays None: Fabric takes a plugin that a strategy has for its precision, over its own argument.
        self._precision = None
        if precision is not None:
            self.dtype = wanted_dtype(precision)
            self._precision = EnginePrecision(precision.precision)

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

    # -- checkpoints -------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes a checkpoint folder, or a plain file if the model is not in ``state``. All ranks.

        The session adds the place in the data, the batch and the random generators.

        Raises:
            ValueError: Something else is at ``path``, or ``state`` has no whole model.
        """
        if storage_options is not None:
            raise TypeError("storage_options is not supported: CopusStrategy writes to a file system")
        names = checkpoints.names_in(state, self.session)
        if names["model"] is None:
            super().save_checkpoint(path, state, filter=filter)
            return
        for name in filter or {}:
            if name in names.values():
                raise ValueError(f"filter={{{name!r}: …}} is not supported: CopusStrategy saves all of it")
        rest = {name: value for name, value in state.items() if name not in names.values()}
        entries = self._convert_stateful_objects_in_state(rest, filter=filter or {})
        checkpoints.save_run(self.session, path, entries, names)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Takes up a checkpoint folder, whatever layout it was saved in, or loads a plain file. All ranks.

        With model and optimizer the run goes on where it was, data, batch and random generators included. With
        the model alone its weights are loaded. Without ``state`` everything is returned, as whole tensors.

        Raises:
            ValueError: The checkpoint is not whole, or is of another model; nothing was changed.
            KeyError: ``state`` has a name that the checkpoint has not, and ``strict`` is set.
        """
        self.session.finish_saving()  # which may be the one that is to be loaded
        model_alone = isinstance(state, Facade)
        names = checkpoints.names_in(state, self.session) if isinstance(state, dict) else {"model": None}
        if os.path.isfile(path) and not model_alone and names["model"] is None:
            return super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        if state is None or state == {}:
            return checkpoints.read_whole(path, weights_only)
        if model_alone:
            checkpoints.load_run(self.session, path, optimizer=False, weights_only=weights_only)
            return {}
        if not isinstance(state, dict):
            raise ValueError(
                f"{type(state).__name__} alone cannot be loaded from {path}: pass a dict with the model and the "
                "optimizer that fabric.setup() returned to fabric.load"
            )
        remainder = checkpoints.load_entries(self.session, path, state, names, strict, weights_only)
        for name, value in state.items():
            if name in names.values() or name not in remainder:
                continue
            if isinstance(value, Module):
                self.load_module_state_dict(value, remainder.pop(name), strict=strict)
            elif isinstance(value, _Stateful):
                value.load_state_dict(remainder.pop(name))
            else:
                state[name] = remainder.pop(name)
        return remainder

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
