"""Squared gradient norms of a step, measured while it runs and without changing it.

Hooks on the parameters see the gradient of one micro-batch before it is accumulated. Every parameter counts once
over the ranks of a replica: shards each count, replicated parameters on tensor rank 0 alone, and of a weight tied
over two stages the first stage counts the square of the summed gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric

from copus_lightning.core.noise import StepNorms


def _world_sum(value: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    total = value.clone()
    dist.all_reduce(total, group=group)
    return [total]


class GradientNorms(Metric):
    """The norms that a step's noise-scale estimate needs, each rank holding its share of every sum.

    State ``shares`` (5, fp64), sum-reduced over the world:
    ``[Σ_k b_k·|g_k|², |ḡ|², number of micro-batches M, target tokens W, samples]``, where ``g_k`` is the mean
    gradient of micro-batch k over its ``b_k`` target tokens and ``ḡ`` that of the global batch.
    """

    full_state_update = False
    shares: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dist_sync_fn=_world_sum, **kwargs)
        self.add_state("shares", torch.zeros(5, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, shares: torch.Tensor) -> None:
        """Adds this rank's share of one step."""
        self.shares += shares

    def compute(self) -> torch.Tensor:
        """The five sums over the whole world."""
        return self.shares

    def step_norms(self) -> StepNorms:
        """The step's norms over the whole world. Reads the device."""
        weighted, mean, n_micro, tokens, samples = self.compute().tolist()
        return StepNorms(
            weighted_micro_sq_norm_sum=weighted,
            mean_sq_norm=mean,
            n_micro_batches=round(n_micro),
            n_target_tokens=round(tokens),
            n_samples=round(samples),
        )


class MicroBatchProbe:
    """Measures ``Σ_k b_k·|g_k|²`` of this rank's parameters over one step.

    Args:
        counted: Parameters whose every gradient entry this rank counts.
        tied: The weight that is tied over the first and the last stage, if this rank holds a copy of it that
            has its other half elsewhere.
        tied_is_first: This rank's copy is the first stage's.
        tied_bounds: The slice of the vocabulary that the copy holds.
        ends: Group of the two ranks that share the tied weight.
    """

    def __init__(
        self,
        counted: list[nn.Parameter],
        tied: nn.Parameter | None,
        tied_is_first: bool,
        tied_bounds: tuple[int, int],
        ends: ProcessGroup,
    ) -> None:
        self.counted = counted
        self.tied, self.tied_is_first, self.tied_bounds, self.ends = tied, tied_is_first, tied_bounds, ends
        self.seconds = 0.0
        self._handles: list[Any] = []
        self._norms: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._tied_now: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def attach(
        self, ids: list[torch.Tensor], n_targets: list[torch.Tensor], total_targets: torch.Tensor
    ) -> None:
        """Watches the next step.

        Args:
            ids: Token ids of each micro-batch.
            n_targets: ``b_k`` of each micro-batch, 0-d.
            total_targets: ``W``, 0-d: the hooks see ``(b_k / W)·g_k``.
        """
        self._ids, self._n_targets, self._w = ids, n_targets, total_targets.double()
        self._norms, self._rows = [], []
        self._total = torch.zeros((), dtype=torch.float64, device=total_targets.device)
        self.seconds = 0.0
        self._handles = [p.register_hook(self._timed(self._hook)) for p in self.counted]
        if self.tied is not None:
            self._handles.append(self.tied.register_hook(self._timed(self._tied_hook)))

    def _timed(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def timed(gradient: torch.Tensor) -> None:
            started = time.perf_counter()
            hook(gradient)
            self.seconds += time.perf_counter() - started

        return timed

    def _hook(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def _tied_hook(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        self._tied_now = gradient

    def micro_batch_done(self, index: int) -> None:
        """To be called after the backward pass of micro-batch ``index``."""
        started = time.perf_counter()
        if self._norms:
            assert self._total is not None
            squares = torch.stack(self._norms).double().square().sum()
            self._total += squares * self._weight(index)
        if self._tied_now is not None:
            self._rows.append(self._tied_now[self._tied_rows(index)].float())
        self._norms, self._tied_now = [], None
        self.seconds += time.perf_counter() - started

    def _weight(self, index: int) -> torch.Tensor:
        """``W²/b_k``, which turns ``|(b_k/W)·g_k|²`` into ``b_k·|g_k|²``; 0 for a micro-batch without targets."""
        b = self._n_targets[index].double()
        return torch.where(b > 0, self._w.square() / b.clamp(min=1), torch.zeros_like(b))

    def _tied_rows(self, index: int) -> torch.Tensor:
        """Rows of the local slice that the embedding's gradient of a micro-batch can touch."""
        low, high = self.tied_bounds
        unique = torch.unique(self._ids[index])
        return unique[(unique >= low) & (unique < high)] - low

    def detach(self) -> torch.Tensor:
        """Stops watching; returns this rank's share of ``Σ_k b_k·|g_k|²``, 0-d fp64."""
        started = time.perf_counter()
        self.abandon()
        assert self._total is not None
        total = self._total
        if self.tied is not None:
            total = total + self._cross_terms(total.device)
        self._rows = []
        self.seconds += time.perf_counter() - started
        return total

    def abandon(self) -> None:
        """Stops watching a step that failed; does nothing after :meth:`detach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _cross_terms(self, device: torch.device) -> torch.Tensor:
        """``Σ_k 2·<embedding part, head part>·W²/b_k``, on the first stage; 0 on the last.

        |E + H|² = |E|² + |H|² + 2<E, H>: each stage has counted the square of its own part already. The
        embedding's gradient is zero outside the rows of the micro-batch's own tokens, so only those rows of the
        head's gradient travel.
        """
        zero = torch.zeros((), dtype=torch.float64, device=device)
        if not self._rows:
            return zero
        rows = torch.cat(self._rows)
        mine, other = dist.get_process_group_ranks(self.ends)
        if not self.tied_is_first:
            if rows.numel():
                dist.send(rows.contiguous(), mine, group=self.ends)
            return zero
        head = torch.empty_like(rows)
        if rows.numel():
            dist.recv(head, other, group=self.ends)
        sizes = [r.shape[0] for r in self._rows]
        for index, (e, h) in enumerate(zip(self._rows, head.split(sizes), strict=True)):
            zero = zero + 2 * (e.double() * h.double()).sum() * self._weight(index)
        return zero
