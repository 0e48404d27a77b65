"""DeepSpeed's pipeline engine for one stage, with the optimizer step taken out of its schedule.

What differs from DeepSpeed's own use of it: groups come from outside (:mod:`groups`), the engine can be built
while another one trains (nothing is communicated and no global is touched until :meth:`StageEngine.activate`),
gradients are summed and not averaged (the loss is already divided by the target tokens of the global batch),
and `optimizer.step()` is a call of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import TensorParallel_Layer, set_autotp_mode
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.distributed import ProcessGroup

from copus_lightning.core.layout import Layout
from copus_lightning.engine.backend import environment, quiet
from copus_lightning.engine.groups import LayoutGroups
from copus_lightning.engine.model import Stage


@dataclass
class MicroBatch:
    """One micro-batch of one data rank, as every rank of its replica holds it.

    Attributes:
        input_ids: ``(samples, tokens)``.
        targets: ``(samples, tokens)``, shifted; -100 marks positions without a target.
        extras: Further keyword arguments of the model (attention mask, position ids).
        n_targets: Number of valid targets, a 0-d tensor on the device.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    extras: dict[str, torch.Tensor]
    n_targets: torch.Tensor


class Grid(PipelineParallelGrid):
    """DeepSpeed's map of ranks, over groups that were made elsewhere. Makes no group and no collective call."""

    def __init__(self, layout: Layout, groups: LayoutGroups | None, own: ProcessGroup) -> None:
        # DeepSpeed's constructor would make new groups for every axis, so it is not called.
        world = dist.get_rank()
        self.global_rank = world if groups is not None else 0
        self.world_size = layout.world_size
        self._topo = PipeModelDataParallelTopology(
            num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data
        )
        self.data_parallel_size = layout.data
        self.pipe_parallel_size = layout.pipeline
        self.model_parallel_size = self.slice_parallel_size = layout.tensor
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == layout.pipeline - 1
        replica = layout.tensor * layout.pipeline
        self.ds_model_proc_group = own if groups is None else groups.replica
        self.ds_model_world_size = replica
        self.ds_model_rank = self.stage_id * layout.tensor + self.get_slice_parallel_rank()
        self.dp_group = layout.axis_ranks("data", self.global_rank)
        self.dp_proc_group = own if groups is None else groups.data
        self.pp_group = layout.axis_ranks("pipeline", self.global_rank)
        self.pp_proc_group = own if groups is None else groups.pipeline
        self.slice_group = layout.axis_ranks("tensor", self.global_rank)
        self.slice_proc_group = own if groups is None else groups.tensor


class StageModule(PipelineModule):
    """A :class:`Stage` in the form that DeepSpeed's pipeline engine takes."""

    def __init__(self, stage: Stage, grid: Grid, loss_fn: Callable[..., torch.Tensor]) -> None:
        # DeepSpeed's constructor would make groups and build all layers, so it is not called.
        nn.Module.__init__(self)
        self.stage = stage
        self.loss_fn = loss_fn
        self._grid = grid
        self._topo = grid.topology()
        self.num_stages = grid.pipe_parallel_size
        self.stage_id = grid.stage_id
        self.global_rank = grid.global_rank
        self.world_size = grid.world_size
        self.local_rank = 0
        self._local_start, self._local_stop = self.stage_id, self.stage_id + 1
        self._num_layers = self.num_stages
        self.forward_funcs = [stage]
        self.tied_modules = nn.ModuleDict()
        self.tied_comms: dict[str, Any] = {}
        self.tied_weight_attrs: dict[str, Any] = {}
        self.activation_checkpoint_interval = 0
        self.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
        self.dynamic_shape = False
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def forward(self, forward_input: torch.Tensor) -> torch.Tensor:
        return self.stage(forward_input)


class GradientSchedule(schedule.TrainSchedule):
    """1F1B up to the reduced gradient: the optimizer step is the caller's."""

    def steps(self) -> Iterator[list[Any]]:
        for commands in super().steps():
            yield [c for c in commands if not isinstance(c, schedule.OptimizerStep)]


class StageEngine(PipelineEngine):
    """One rank's part of the pipeline under one layout.

    Built by :meth:`build` without any communication, then :meth:`activate`\\ d once its parameters are real.

    Attributes:
        on_micro_batch: Called after the backward pass of each micro-batch, with its index.
    """

    @classmethod
    def build(
        cls,
        stage: Stage,
        own: ProcessGroup,
        loss_fn: Callable[..., torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> StageEngine:
        """Sets DeepSpeed up around a stage whose parameters may still be on ``meta``. No communication."""
        grid = Grid(Layout(), None, own)
        module = StageModule(stage, grid, loss_fn)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
        }
        mpu_before = deepspeed_groups.mpu
        try:
            with environment(LOCAL_RANK=_local_rank(device)), quiet(prints=False):
                parsed = DeepSpeedConfig(config, mpu=grid)
                return cls(
                    args=None,
                    model=module,
                    mpu=grid,
                    dist_init_required=False,
                    config=config,
                    config_class=parsed,
                    dont_change_device=True,
                )
        finally:
            deepspeed_groups.mpu = mpu_before

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_micro_batch: Callable[[int], None] | None = None
        self.groups: LayoutGroups | None = None
        self._step_batches: list[MicroBatch] = []
        self._forwards = self._backwards = 0
        self._activation_shape: tuple[int, ...] | None = None
        skeleton: Any = self.module.stage.model
        self.hidden_size: int = skeleton.config.hidden_size
        self.activation_dtype = torch.bfloat16 if self.bfloat16_enabled() else torch.float32

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """The optimizer is attached in :meth:`activate`, when parameters are real."""

    def _configure_bf16_optimizer(self, optimizer: Any) -> None:
        """As above: DeepSpeed would make a placeholder when no optimizer is given."""

    def _broadcast_model(self) -> None:
        """Weights come from the masters, which every rank already has; nothing is broadcast."""

    def activate(self, groups: LayoutGroups, optimizer: Any) -> None:
        """Enters a layout: points DeepSpeed's maps and globals at it and takes the optimizer of real parameters.

        No collective call.
        """
        grid = Grid(groups.layout, groups, groups.own)
        self.groups = groups
        self.grid = self.mpu = self.module._grid = grid
        self.module._topo = grid.topology()
        self.global_rank = grid.global_rank
        self.num_stages = self.module.num_stages = grid.pipe_parallel_size
        self.stage_id = self.module.stage_id = grid.stage_id
        self.prev_stage, self.next_stage = grid.stage_id - 1, grid.stage_id + 1
        self.is_pipe_parallel = grid.pipe_parallel_size > 1
        self.is_data_parallel = grid.data_parallel_size > 1
        self.is_model_parallel = grid.model_parallel_size > 1
        self.data_parallel_group = self.seq_data_parallel_group = groups.data
        self.dp_world_size = self.seq_dp_world_size = grid.data_parallel_size
        self.mp_world_size = grid.get_model_parallel_world_size()
        self.gradient_average = False
        self.param_names = {p: n for n, p in self.module.named_parameters()}
        self.optimizer = optimizer
        self.using_bf16_optimizer = isinstance(optimizer, BF16_Optimizer)
        deepspeed_groups.mpu = grid
        set_autotp_mode(training=True)

    def deactivate(self) -> None:
        """Leaves the layout and empties this engine, for good.

        Frees what DeepSpeed's globals hold of it, if it is the active one.
        """
        if "grid" not in vars(self):
            return
        if deepspeed_groups.mpu is self.grid:
            reset_globals()
        # Shards refer to their layers and these to their groups: a cycle, through the parameters.
        for module in self.module.modules():
            if isinstance(module, TensorParallel_Layer):
                module.mp_group = None
        for parameter in self.module.parameters():
            parameter.__dict__.clear()
        self.destroy()
        # Outputs, closures, hooks and timers refer to this engine from within, some through C++, where no collector
        # sees it. Without this, weights and gradients would stay beside those of the next layout.
        self.module.loss_fn = None  # type: ignore[assignment]
        self.__dict__.clear()

    # -- one step ----------------------------------------------------------------------------------------------

    def forward_backward(self, batches: list[MicroBatch]) -> torch.Tensor:
        """Runs the pipeline over one step's micro-batches and leaves the reduced gradient on every rank.

        Returns:
            On the last stage the sum of the micro-batches' losses, elsewhere 0; a 0-d fp32 tensor.
        """
        self._begin(batches)
        self.module.train()
        self._compute_loss = True
        self._exec_schedule(
            GradientSchedule(micro_batches=len(batches), stages=self.num_stages, stage_id=self.stage_id)
        )
        return self._summed_loss()

    @torch.no_grad()
    def forward_only(self, batches: list[MicroBatch]) -> torch.Tensor:
        """As :meth:`forward_backward`, without gradients."""
        self._begin(batches)
        training = self.module.training
        self.module.eval()
        self._compute_loss = True
        try:
            self._exec_schedule(
                schedule.InferenceSchedule(
                    micro_batches=len(batches), stages=self.num_stages, stage_id=self.stage_id
                )
            )
        finally:
            self.module.train(training)
        return self._summed_loss()

    def _begin(self, batches: list[MicroBatch]) -> None:
        shape = tuple(batches[0].input_ids.shape)
        self._activation_shape = shape
        # A step that failed may have left activations behind.
        self.num_pipe_buffers = 0
        self.pipe_buffers: dict[str, list[Any]] = {
            key: [] for key in ("inputs", "labels", "outputs", "output_tensors")
        }
        self.grad_layer = None
        self.micro_batches = len(batches)
        self.micro_batch_size = shape[0]
        self._step_batches = batches
        self._forwards = self._backwards = 0
        self.total_loss = None
        self.set_dataiterator(iter([(b.input_ids, b.targets) for b in batches]))

    def _summed_loss(self) -> torch.Tensor:
        self._step_batches = []
        self.data_iterator = None
        if self.is_last_stage() and self.total_loss is not None:
            return self.total_loss.float()
        return torch.zeros((), device=self.device)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        batch = self._step_batches[self._forwards]
        self._forwards += 1
        self.module.stage.extras = batch.extras
        super()._exec_forward_pass(buffer_id)

    # DeepSpeed sends over the WORLD group and tells shapes first. Here the pipeline's own group is used, and the
    # shape is known: activations are (samples, tokens, hidden) in the weights' type.

    def _exec_send_activations(self, buffer_id: int) -> None:
        self._send(self.pipe_buffers["outputs"][buffer_id], self.next_stage)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        received = self._receive(self.prev_stage)
        received.requires_grad = True
        self.pipe_buffers["inputs"][buffer_id] = received

    def _exec_send_grads(self, buffer_id: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        assert inputs.grad is not None
        self._send(inputs.grad, self.prev_stage)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        self.grad_layer = self._receive(self.next_stage)  # type: ignore[assignment]

    def _send(self, tensor: torch.Tensor, stage: int) -> None:
        assert self.groups is not None
        peer = self.grid.pp_group[stage]
        dist.send(tensor.detach().contiguous(), peer, group=self.groups.pipeline)

    def _receive(self, stage: int) -> torch.Tensor:
        assert self.groups is not None and self._activation_shape is not None
        shape = (*self._activation_shape, self.hidden_size)
        buffer = torch.empty(shape, dtype=self.activation_dtype, device=self.device)
        dist.recv(buffer, self.grid.pp_group[stage], group=self.groups.pipeline)
        return buffer

    def _exec_backward_pass(self, buffer_id: int) -> None:
        super()._exec_backward_pass(buffer_id)
        if self.on_micro_batch is not None:
            self.on_micro_batch(self._backwards)
        self._backwards += 1

    def _exec_reduce_tied_grads(self) -> None:
        """Tied weights are summed after the data-parallel reduction, in one place with it."""

    def _exec_reduce_grads(self) -> None:
        assert self.groups is not None
        if self.is_data_parallel:
            super()._exec_reduce_grads()
        else:
            self._get_gradients_for_reduction()  # makes the zeros of parameters without a gradient
        if not self.is_pipe_parallel:
            return
        for parameter in self.module.parameters():
            if getattr(parameter, "copus_tied", False):
                gradient = parameter._hp_grad if self.using_bf16_optimizer else parameter.grad
                dist.all_reduce(gradient, group=self.groups.ends)

    _INSTRUCTION_MAP = types.MappingProxyType(
        {
            **PipelineEngine._INSTRUCTION_MAP,
            schedule.ReduceGrads: _exec_reduce_grads,
            schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
            schedule.ForwardPass: _exec_forward_pass,
            schedule.BackwardPass: _exec_backward_pass,
            schedule.SendActivation: _exec_send_activations,
            schedule.RecvActivation: _exec_recv_activations,
            schedule.SendGrad: _exec_send_grads,
            schedule.RecvGrad: _exec_recv_grads,
        }
    )


def reset_globals() -> None:
    """Frees what DeepSpeed keeps of an engine in its modules."""
    deepspeed_groups.mpu = None
    set_autotp_mode(training=False)


def _local_rank(device: torch.device) -> str:
    """What DeepSpeed is to take for the index of the device: launchers number ranks, and may leave devices out."""
    import os

    return os.environ.get("LOCAL_RANK", "0") if device.index is None else str(device.index)
