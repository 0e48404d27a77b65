"""DeepSpeed's Megatron-style layers, built from a shard instead of from the whole matrix.

DeepSpeed's own constructors take the full matrix and cut it. A rank here never holds more than its shard, so
these subclasses take a module whose parameters already have the shard's size (on any device, also ``meta``) and
the widths of all shards. Forward and backward are DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.module_inject.layers import (
    ColumnParallel,
    LinearAllreduce,
    LinearLayer,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from torch import nn
from torch.distributed import ProcessGroup


class _FromShard:
    """Takes the frozen shard widths from the caller, and cuts nothing."""

    _widths: tuple[int, ...]

    def __init__(self, module: nn.Module, group: ProcessGroup, widths: tuple[int, ...]) -> None:
        object.__setattr__(self, "_widths", widths)
        super().__init__(module, group)  # type: ignore[call-arg]

    def _should_materialize_tp_partition(self) -> bool:
        return False

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        self._partition_sizes = self._widths
        return self._widths

    def _mark_uc_metadata(self) -> None:
        """DeepSpeed's universal checkpoint is not used; the metadata would describe the shard as the whole."""


class ColumnParallelLinear(_FromShard, LinearLayer):
    """``y_local = x W_localᵀ``: output features are cut; the gradient of ``x`` is summed over the group."""


class RowParallelLinear(_FromShard, LinearAllreduce):
    """``y = Σ_ranks x_local W_localᵀ``: input features are cut; the bias is replicated and added once."""


class VocabColumnParallelLinear(_FromShard, VocabParallelLinear):
    """The head: logits stay local to the rank's slice of the vocabulary."""


class VocabRowParallelEmbedding(_FromShard, VocabParallelEmbedding):
    """The embedding: each rank looks up the tokens of its slice of the vocabulary; the sum is all-reduced."""

    def __init__(self, module: nn.Module, group: ProcessGroup, widths: tuple[int, ...]) -> None:
        super().__init__(module, group, widths)
        if self.embed_scale is not None:  # a copy on the weight's device, which may be meta
            self.register_buffer("embed_scale", module.embed_scale, persistent=False)

    @staticmethod
    def validate_embedding(module: Any) -> None:
        """Takes every embedding that the model's description takes: a plain or a scaled one."""


class SummedGradient(nn.Module):
    """A replicated module that works on a rank's share of the activations: its gradients are summed over the group.

    Such are the norms of queries and keys in some families, over each of the heads that a rank has. The module's
    parameters keep their names.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._module = [module]  # no child: that would rename the parameters
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        summed = {name: ColumnParallel.apply(self._group, p) for name, p in self.named_parameters()}
        return torch.func.functional_call(self._module[0], summed, args, kwargs)


def shrink(module: nn.Module, name: str, bounds: tuple[int, int], dim: int) -> None:
    """Replaces parameter ``name`` by an uninitialised one that holds ``bounds`` of dimension ``dim`` alone."""
    whole: torch.Tensor = getattr(module, name)
    shape = list(whole.shape)
    shape[dim] = bounds[1] - bounds[0]
    empty = torch.empty(shape, dtype=whole.dtype, device="meta")
    setattr(module, name, nn.Parameter(empty, requires_grad=whole.requires_grad))


def vocabulary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: ProcessGroup | None,
    bounds: tuple[int, int],
    ignore_index: int = -100,
) -> torch.Tensor:
    """Summed cross-entropy in fp32 over the valid targets, with logits cut over the vocabulary.

    Args:
        logits: ``(samples, tokens, vocabulary shard)``.
        targets: ``(samples, tokens)``, already shifted; ``ignore_index`` marks positions without a target.
        group: The tensor-parallel group, or None for whole logits.
        bounds: First and one past the last vocabulary entry of this shard.

    Returns:
        A 0-d tensor; 0 (with a gradient of 0) if no target is valid.
    """
    if group is None:
        return nn.functional.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=ignore_index, reduction="sum"
        )
    from deepspeed.sequence.cross_entropy import _VocabParallelCrossEntropy

    apply: Any = _VocabParallelCrossEntropy.apply
    return apply(logits, targets, group, *bounds, ignore_index).sum()
