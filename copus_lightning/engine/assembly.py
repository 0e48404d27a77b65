"""Builds a layout, fills it, and carries the state from one layout to the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from copus_lightning.core.layout import Layout
from copus_lightning.engine.exchange import ExchangePlan, missing_elements, plan
from copus_lightning.engine.family import check_family
from copus_lightning.engine.groups import LayoutGroups
from copus_lightning.engine.layers import vocabulary_cross_entropy
from copus_lightning.engine.memory import Sizes
from copus_lightning.engine.model import ModelDescription
from copus_lightning.engine.optimizer import MASTER, OptimizerHandle, ShardOptimizer, is_flat
from copus_lightning.engine.pipeline import MicroBatch, StageEngine, reset_globals
from copus_lightning.engine.probes import GradientNorms, MicroBatchProbe
from copus_lightning.engine.state import LogicalTensor, Piece, StateMap
from copus_lightning.engine.transfer import Storages

IGNORED = -100


class Live:
    """The layout that is alive on this rank: groups, DeepSpeed's engine, the local optimizer, the probe.

    Attributes:
        loss_scale: 0-d tensor that each micro-batch's summed loss is multiplied with: one over the target
            tokens of the global batch.
    """

    def __init__(
        self,
        groups: LayoutGroups,
        engine: StageEngine,
        optimizer: ShardOptimizer,
        state_map: StateMap,
        tied: set[str],
        rank: int,
    ) -> None:
        self.groups, self.engine, self.optimizer, self.state_map = groups, engine, optimizer, state_map
        self.layout = groups.layout
        self.rank = rank
        self.pieces: list[Piece] = state_map.pieces(self.layout, rank)
        self.loss_scale = torch.ones(())
        self.norms = GradientNorms()
        at = self.layout.coordinates(rank)
        last = self.layout.pipeline - 1
        by_name = {t.name: t for t in state_map.tensors}
        split_ends = {n for n in tied if last > 0 and at.pipeline in (0, last)}
        self._counted: set[str] = set()
        """Parameters whose reduced gradient this rank counts in the global norm."""
        probed, tied_parameter, tied_bounds = [], None, (0, 0)
        for name, parameter in optimizer.parameters.items():
            tensor = by_name[name]
            whole_here = tensor.shard_dim is not None or at.tensor == 0
            if name in split_ends:
                parameter.copus_tied = True  # type: ignore[attr-defined]
                if whole_here:
                    tied_parameter = parameter
                    bounds = tensor.shard_dim is not None
                    tied_bounds = (
                        tensor.shard_bounds(self.layout.tensor, at.tensor) if bounds else (0, tensor.shape[0])
                    )
            elif whole_here:
                probed.append(parameter)
            if whole_here and not (name in split_ends and at.pipeline == last):
                self._counted.add(name)
        self.probe = MicroBatchProbe(probed, tied_parameter, at.pipeline == 0, tied_bounds, groups.ends)

    def name(self, piece: Piece) -> str:
        """Logical name of a piece's tensor."""
        return self.state_map.tensors[piece.tensor].name

    def squared_gradient_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm of the reduced gradient, 0-d fp64.

        Data ranks share the work: with ZeRO-1 each counts its own partition, with ZeRO-0 every n-th parameter.
        A replica that another rank counts adds 0 times its norm, which is NaN if it is not finite: a fault of
        one rank alone must not slip into its copy.
        """
        gradients = self.optimizer.gradients()
        data_rank = self.layout.coordinates(self.rank).data
        counted, others = [], []
        for piece in self.pieces:
            name = self.name(piece)
            if name not in gradients:
                continue
            part = gradients[name].reshape(-1)[piece.flat_start : piece.flat_stop]
            if name not in self._counted:
                others.append(part)
            elif self.state_map.zero_stage == 1 or piece.tensor % self.layout.data == data_rank:
                counted.append(part)
        if not counted and not others:
            return torch.zeros((), dtype=torch.float64, device=self.loss_scale.device)
        norms = torch.stack(torch._foreach_norm(counted + others)).double()
        return norms[: len(counted)].square().sum() + 0.0 * norms[len(counted) :].sum()

    def storages(self, keys: Collection[str]) -> Storages:
        """Flat fp32 storage of every piece for some state keys: what its param group keeps of them, made if missing."""
        kept = [[k for k in self.optimizer.handle.keys(p.group) if k in keys] for p in self.pieces]
        return Storages(
            [
                {key: self.optimizer.storage(piece, self.name(piece), key) for key in wanted}
                for piece, wanted in zip(self.pieces, kept, strict=True)
            ]
        )

    def close(self) -> None:
        """Drops engine, hooks and references; groups are the cache's."""
        self.engine.deactivate()
        self.optimizer.close()


@dataclass
class Prepared:
    """A layout of which everything is ready that needs no old state; ``live`` once it has its memory."""

    groups: LayoutGroups
    engine: StageEngine
    live: Live | None = None

    def close(self) -> None:
        """Drops what was prepared: its hooks are references that no garbage collector sees."""
        if self.live is not None:
            self.live.close()
            self.live = None
        else:
            self.engine.deactivate()


class Assembler:
    """Makes :class:`Live` layouts of one model and one optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Any,
        device: torch.device,
        seed: int,
    ) -> None:
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name
        trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        frozen = sorted(set(names.values()) - trainable)
        if frozen:
            raise ValueError(
                f"{len(frozen)} parameters do not require a gradient, first {frozen[0]!r}: "
                "frozen parameters are not supported yet, set requires_grad=True"
            )
        self.handle = OptimizerHandle(optimizer, names, trainable)
        self.description = ModelDescription(model, seed)
        self.rank = dist.get_rank()
        untried = check_family(model)
        if untried is not None and self.rank == 0:
            warnings.warn(untried, stacklevel=2)
        self.settings, self.device = settings, device
        self.state_map = self.description.state_map(settings.zero_stage, self.handle.groups)

    @staticmethod
    def _release_originals(optimizer: Optimizer) -> None:
        """The user's optimizer keeps its parameters as handles only: their storage is not needed."""
        # The description holds the values until they are handed out.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.is_meta:
                    parameter.data = parameter.data.new_empty(0)

    # -- building ----------------------------------------------------------------------------------------------

    def prepare(self, groups: LayoutGroups) -> Prepared:
        """Everything of a layout that needs no old state and no memory. No collective call."""
        stage = self.description.build_stage(self.state_map, groups, self.rank)
        engine = StageEngine.build(
            stage, groups.own, lambda *_: torch.zeros(()), self.settings.dtype, self.device
        )
        return Prepared(groups=groups, engine=engine)

    def allocate(self, prepared: Prepared, with_state: bool) -> None:
        """Gives a prepared layout its memory, with undefined contents. No collective call, no global touched.

        Args:
            prepared: Made by :meth:`prepare`.
            with_state: Also make the optimizer's moments.
        """
        engine = prepared.engine
        _allocate(engine.module, self.device, self.settings.dtype)
        order = {t.name: i for i, t in enumerate(self.state_map.tensors)}
        parameters = engine.module.stage.logical_parameters(self.description.tied)
        parameters = {n: parameters[n] for n in sorted(parameters, key=order.__getitem__)}
        shards = prepared.groups.data if self.settings.zero_stage == 1 else prepared.groups.own
        optimizer = ShardOptimizer(self.handle, parameters, self.settings.zero_stage, shards)
        tied = set(self.description.tied.values())
        live = Live(prepared.groups, engine, optimizer, self.state_map, tied, self.rank)
        live.loss_scale = live.loss_scale.to(self.device)
        live.norms.to(self.device)
        prepared.live = live
        live.storages(self.handle.all_keys(with_state))

    def materialise(self, prepared: Prepared, with_state: bool = False) -> Live:
        """Enters a prepared layout, with memory of undefined contents. No collective call."""
        if prepared.live is None:
            self.allocate(prepared, with_state)
        live = prepared.live
        assert live is not None
        live.engine.activate(live.groups, live.optimizer.engine_optimizer)
        live.engine.module.loss_fn = self._loss_fn(live, live.layout)
        return live

    def _loss_fn(self, live: Live, layout: Layout) -> Callable[..., torch.Tensor]:
        group = live.groups.tensor if layout.tensor > 1 else None
        vocabulary = self.description.shape.vocab_size
        head = LogicalTensor("head", (vocabulary, 1), shard_dim=0, on_last=True)
        bounds = head.shard_bounds(layout.tensor, layout.coordinates(self.rank).tensor)

        def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return vocabulary_cross_entropy(logits, targets, group, bounds) * live.loss_scale

        return loss_fn

    def first(self, groups: LayoutGroups) -> Live:
        """The first layout, with the model's initial weights. The model and the optimizer give theirs away."""
        self.description.take_weights()
        self._release_originals(self.handle.optimizer)
        self._agree_on_weights()
        live = self.materialise(self.prepare(groups))
        storages = live.storages((MASTER,))
        for piece, storage in zip(live.pieces, storages.by_piece, strict=True):
            tensor = self.state_map.tensors[piece.tensor]
            whole = self.description.initial_weight(tensor)
            at = live.layout.coordinates(self.rank)
            if tensor.shard_dim is not None:
                low, high = tensor.shard_bounds(live.layout.tensor, at.tensor)
                whole = whole.narrow(tensor.shard_dim, low, high - low)
            storage[MASTER].copy_(whole.reshape(-1)[piece.flat_start : piece.flat_stop])
        live.optimizer.publish_weights()
        self.description.forget_weights()
        return live

    def _agree_on_weights(self) -> None:
        """Rank 0's weights count, as under DDP, if the ranks were not seeded alike."""
        weights = self.description.initial_weights
        if not weights:
            return
        sums = torch.stack([w.double().sum().cpu() for w in weights.values()]).to(self.device)
        first = sums.clone()
        dist.broadcast(first, 0)
        differs = torch.tensor([float(not torch.equal(first, sums))], device=self.device)
        dist.all_reduce(differs)
        if differs.item():
            for name in list(weights):
                value = weights[name].to(self.device)
                dist.broadcast(value, 0)
                weights[name] = value.cpu()

    # -- carrying state ----------------------------------------------------------------------------------------

    @property
    def flat_groups(self) -> list[int] | None:
        """Param group of each tensor, if the pieces of a group lie end to end in one storage."""
        if not is_flat(self.settings.zero_stage, self.settings.dtype):
            return None
        return [tensor.group for tensor in self.state_map.tensors]

    def sizes(self, layout: Layout, with_state: bool) -> Sizes:
        """What this rank has under a layout, masters of fp32 weights counted as if they were a copy."""
        tensor_rank = layout.coordinates(self.rank).tensor
        local = (self.state_map.tensors[i] for i in self.state_map.local_tensors(layout, self.rank))
        n_weights = sum(prod(tensor.shard_shape(layout.tensor, tensor_rank)) for tensor in local)
        n_state = sum(piece.numel for piece in self.state_map.pieces(layout, self.rank))
        gradient_bytes = 4
        weights = n_weights * (self.settings.dtype.itemsize + gradient_bytes)
        return Sizes(weights, n_state * 4, len(self.handle.all_keys(with_state)))

    def plan(self, source: Layout, target: Layout) -> ExchangePlan:
        """This rank's part of the exchange between two layouts."""
        return plan(self.state_map, source, target, self.rank, self.settings.ranks_per_node)

    def missing_elements(self, source: Layout, target: Layout) -> list[int]:
        """Elements of each param group that this rank needs under ``target`` and does not hold under ``source``."""
        counts = []
        for group in range(len(self.handle.schemas)):
            # Where a group's tensors lie does not depend on the other groups.
            tensors = tuple(t for t in self.state_map.tensors if t.group == group)
            counts.append(
                missing_elements(replace(self.state_map, tensors=tensors), source, target, self.rank)
            )
        return counts

    def state_bytes(self, elements: Sequence[int], with_state: bool) -> int:
        """Bytes of so many elements of each param group: of the masters and, with state, of each moment."""
        n_keys = [len(self.handle.keys(group)) if with_state else 1 for group in range(len(elements))]
        return sum(4 * n * count for n, count in zip(n_keys, elements, strict=True))

    @staticmethod
    def reset_globals() -> None:
        """Frees what DeepSpeed's modules hold, also of a layout that was only half built."""
        reset_globals()

    @staticmethod
    def settle(live: Live, scalars: dict[int, dict[str, Any]]) -> None:
        """After masters and moments are in place: step counts, and weights recast from the masters."""
        live.optimizer.load_scalars(scalars)
        live.optimizer.publish_weights()

    @staticmethod
    def gather_scalars(live: Live) -> dict[int, dict[str, Any]]:
        """Step counts by user group, from whichever rank has them. Collective over the layout's world group."""
        scalars, _ = Assembler.gather_notes(live)
        return scalars

    @staticmethod
    def gather_notes(live: Live, note: bool = True) -> tuple[dict[int, dict[str, Any]], bool]:
        """As :meth:`gather_scalars`, and whether every rank's ``note`` is true."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (live.optimizer.scalars(), note), group=live.groups.world)
        scalars = {group: values for mine, _ in everyone for group, values in mine.items()}
        return scalars, all(note for _, note in everyone)

    # -- data and inspection -----------------------------------------------------------------------------------

    def split(self, batch: Mapping[str, torch.Tensor], micro_batch_size: int) -> list[MicroBatch]:
        """Cuts a batch into micro-batches and shifts its labels, on the device."""
        known = {k: v.to(self.device) for k, v in batch.items() if isinstance(v, torch.Tensor)}
        ids = known.pop("input_ids")
        labels = known.pop("labels", ids)
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        counts = (targets != IGNORED).flatten(1).sum(1)
        batches = []
        for start in range(0, ids.shape[0], micro_batch_size):
            rows = slice(start, start + micro_batch_size)
            extras = {k: v[rows] for k, v in known.items()}
            batches.append(MicroBatch(ids[rows].contiguous(), targets[rows], extras, counts[rows].sum()))
        return batches

    def gather(self, live: Live, key: str) -> dict[str, torch.Tensor]:
        """Whole tensors of one state key or of the gradient, on every rank, where a param group keeps it.

        Raises:
            ValueError: No param group keeps such a state, or there is none yet.
        """
        gradients = live.optimizer.gradients() if key == "gradient" else {}
        # One buffer for all, for one reduction; what no rank has would stay infinite.
        keys = [("gradient", *self.handle.keys(group)) for group in range(len(self.handle.schemas))]
        tensors = [t for t in self.state_map.tensors if key in keys[t.group]]
        if not tensors:
            known = ", ".join(dict.fromkeys(k for kept in keys for k in kept))
            raise ValueError(f"there is no state {key!r}: choose among {known}")
        if key not in ("gradient", MASTER) and not self.gather_scalars(live):
            raise ValueError(f"there is no state {key!r} before the first optimizer step")
        flat = torch.full((sum(t.numel for t in tensors),), -torch.inf)
        parts = flat.split([t.numel for t in tensors])
        whole = {t.name: part.view(t.matrix_shape) for t, part in zip(tensors, parts, strict=True)}
        tensor_rank = live.layout.coordinates(self.rank).tensor
        for piece in live.pieces:
            tensor = self.state_map.tensors[piece.tensor]
            if tensor.name not in whole:
                continue
            low, high = tensor.shard_columns(live.layout.tensor, tensor_rank)
            if key == "gradient":
                mine = gradients[tensor.name].detach().reshape(-1)[piece.flat_start : piece.flat_stop]
            else:
                mine = live.optimizer.storage(piece, tensor.name, key)
            shard = torch.full((tensor.matrix_shape[0] * (high - low),), -torch.inf)
            shard[piece.flat_start : piece.flat_stop] = mine.cpu()
            target = whole[tensor.name][:, low:high]
            target.copy_(torch.maximum(target, shard.view(target.shape)))
        flat = flat.to(self.device)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        parts = flat.cpu().split([t.numel for t in tensors])
        return {t.name: part.view(t.shape) for t, part in zip(tensors, parts, strict=True)}


def _allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces every ``meta`` parameter by an uninitialised one on ``device``; moves buffers there."""
    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter.is_meta and id(parameter) not in replaced:
                real = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
                real.__dict__.update(parameter.__dict__)
                replaced[id(parameter)] = real
            if id(parameter) in replaced:
                child._parameters[name] = replaced[id(parameter)]
        for name, buffer in list(child.named_buffers(recurse=False)):
            child._buffers[name] = buffer.to(device)
