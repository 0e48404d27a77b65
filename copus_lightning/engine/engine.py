"""One model, one layout alive at a time: measure, step, switch.

The engine knows nothing of Lightning. Its two faces (:mod:`copus_lightning.strategies`) call :meth:`Engine.step`
for the forward and backward passes of one optimizer step, :meth:`Engine.update` for the optimizer step, and
:meth:`Engine.switch` between two of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from copus_lightning.core.layout import Configuration, Coordinates, Layout
from copus_lightning.core.noise import StepNorms
from copus_lightning.engine.backend import load_deepspeed
from copus_lightning.engine.groups import GroupCache, LayoutGroups

IGNORED = -100
"""Label of a position without a target, as in Hugging Face models."""


@dataclass(frozen=True)
class EngineSettings:
    """What stays the same over all layouts of a run.

    Args:
        zero_stage: 0, every data rank keeps all masters and moments of its shards; 1, each keeps a share.
        dtype: Of weights and activations: ``torch.float32``, or ``torch.bfloat16`` with fp32 masters, moments
            and gradient accumulation.
        gradient_clip_norm: Largest global gradient norm, or None.
        cache_groups: Keep the process groups of layouts that were left, for a cheap return.
        ranks_per_node: Ranks that share a node, preferred as sources in a switch; None if all are equally near.
        buffer_bytes: Size of the buffer through which pieces travel in a switch.
    """

    zero_stage: int = 1
    dtype: torch.dtype = torch.float32
    gradient_clip_norm: float | None = None
    cache_groups: bool = True
    ranks_per_node: int | None = None
    buffer_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1):
            raise ValueError(
                f"zero_stage must be 0 or 1, not {self.zero_stage!r}: pipelines do not go with higher ones"
            )
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"precision must be 32-true, bf16-true or bf16-mixed, not {self.dtype}")
        if self.gradient_clip_norm is not None and not self.gradient_clip_norm > 0:
            raise ValueError(f"gradient_clip_norm must be positive or null, not {self.gradient_clip_norm}")


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        applied: False if a gradient was not finite: then no rank changed anything.
        gradient_norm: Global norm of the mean gradient, before clipping, after the user's loss scale.
        clip_coefficient: What the gradient was multiplied with; equal on all ranks.
        norms: For the noise scale, if this step was measured.
        n_samples: Samples of the global batch.
        n_target_tokens: Target tokens of the global batch.
    """

    applied: bool
    gradient_norm: float
    clip_coefficient: float
    norms: StepNorms | None
    n_samples: int
    n_target_tokens: int


@dataclass
class SwitchReport:
    """What one switch cost.

    Attributes:
        seconds: Of each phase; they sum to ``total_seconds`` but for what lies between them.
        bytes_moved: Bytes that crossed from rank to rank, over all ranks.
        bytes_lower_bound: What the ranks need and did not hold, over all ranks.
    """

    source: Configuration
    target: Configuration
    layout_changed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    bytes_moved: int = 0
    bytes_lower_bound: int = 0


class Engine:
    """Trains one causal language model under a layout that can change between two steps.

    Collective: every method is called on all ranks of the WORLD group, in the same order.

    Args:
        model: A Hugging Face model with a language-model head. It becomes a skeleton: its weights are handed to
            their ranks and freed.
        optimizer: The user's optimizer over the model's parameters; see :mod:`optimizer`.
        configuration: Where to begin.
        settings: What stays the same.
        device: This rank's device.
        seed: Seeds the weights of a model that was built on ``meta``.

    Raises:
        ValueError: The model, the optimizer or the layout does not fit; nothing was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        configuration: Configuration,
        settings: EngineSettings,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        load_deepspeed(device)
        from copus_lightning.engine.assembly import Assembler

        self.settings, self.device = settings, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.groups = GroupCache(keep=settings.cache_groups)
        self._own = self.groups.own()
        self.assembler = Assembler(model, optimizer, settings, device, self._own, seed)
        self.check(configuration)
        self.configuration = configuration
        self.measure_next = False
        self.probe_seconds = 0.0
        self.live = self.assembler.first(self.groups.get(configuration.layout))
        self._stepped: _Stepped | None = None

    def check(self, configuration: Configuration) -> None:
        """Refuses a configuration that this model and world cannot be in.

        Raises:
            ValueError: One line that names what does not fit.
        """
        configuration.layout.check(world_size=self.world_size, shape=self.assembler.description.shape)

    @property
    def layout(self) -> Layout:
        """The layout that is alive."""
        return self.configuration.layout

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place in it."""
        return self.layout.coordinates(self.rank)

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of one optimizer step: leaves the reduced gradient on every rank.

        Args:
            batch: This data rank's samples: ``input_ids`` (samples, tokens), ``labels`` likewise (default: the
                ids), and further arguments of the model's forward. Tensor and pipeline peers pass the same.

        Returns:
            Mean loss over the target tokens of the global batch, 0-d fp32, equal on all ranks.
        """
        if self._stepped is not None:
            raise RuntimeError(
                "the model was called twice without optimizer.step(): one call runs all micro-batches of a "
                "step, so drop the script's own gradient accumulation"
            )
        expected = self.configuration.data_rank_batch_size
        rows = batch["input_ids"].shape[0]
        if rows != expected:
            raise ValueError(
                f"the batch has {rows} samples, but {self.configuration} takes {expected} per data rank: "
                "iterate over the loader that fabric.setup_dataloaders() returned"
            )
        batches = self.assembler.split(batch, self.configuration.micro_batch_size)
        total = sum(b.n_targets for b in batches)
        assert isinstance(total, torch.Tensor)
        if self.layout.data > 1:
            dist.all_reduce(total, group=self.live.groups.data)
        self.live.loss_scale = torch.where(total > 0, 1.0 / total.clamp(min=1), 0.0).float()

        measured = self.measure_next
        self.measure_next = False
        probe = self.live.probe
        if measured:
            probe.attach([b.input_ids for b in batches], [b.n_targets for b in batches], total)
            self.live.engine.on_micro_batch = probe.micro_batch_done
        try:
            loss = self.live.engine.forward_backward(batches)
        finally:
            self.live.engine.on_micro_batch = None
            weighted = probe.detach() if measured else None

        at = self.coordinates
        speaks = at.tensor == 0 and at.pipeline == 0
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        if at.tensor == 0 and at.pipeline == self.layout.pipeline - 1:
            sums[0] = loss
        sums[1] = self.live.squared_gradient_norm()
        if speaks:
            sums[2] = total / self.layout.data
        mean_share = sums[1].clone()
        dist.all_reduce(sums)
        norms = None
        if weighted is not None:
            started = time.perf_counter()
            norms = self.live.norms
            norms.reset()
            n_micro = sum((b.n_targets > 0).double() for b in batches)
            shares = [weighted, mean_share]
            shares += [n_micro, total.double() / self.layout.data, torch.tensor(float(rows), dtype=torch.float64)]
            keep = [1.0, 1.0] + [float(speaks)] * 3
            norms.update(torch.stack([s.to(self.device) * k for s, k in zip(shares, keep, strict=True)]))
            self.probe_seconds = probe.seconds + time.perf_counter() - started
        self._stepped = _Stepped(
            sums=sums,
            norms=norms,
            n_samples=self.configuration.global_batch_size,
            clip_norm=self.settings.gradient_clip_norm,
        )
        return sums[0].float()

    def update(self, gradient_scale: float = 1.0, learning_rate_factor: float = 1.0) -> StepOutcome:
        """The optimizer step: clips by the global norm and updates, or changes nothing if it is not finite.

        Args:
            gradient_scale: What the user multiplied the loss with before its backward pass.
            learning_rate_factor: Multiplies the rate that the user's optimizer holds, for this step.
        """
        if self._stepped is None:
            raise RuntimeError("optimizer.step() was called before the model: there is no gradient")
        stepped, self._stepped = self._stepped, None
        _, square, tokens = stepped.sums.tolist()
        norms = stepped.norms.step_norms() if stepped.norms is not None else None
        norm = math.sqrt(square) * abs(gradient_scale) if square >= 0 else math.nan
        applied = math.isfinite(norm)
        clip, limit = 1.0, stepped.clip_norm
        if limit is not None and applied and norm > limit:
            clip = limit / (norm + 1e-6)
        if applied:
            self.live.optimizer.scale_gradients(clip * gradient_scale)
            self.live.optimizer.step(learning_rate_factor)
        else:
            norms = None
            self.live.optimizer.zero_grad()
        return StepOutcome(
            applied=applied,
            gradient_norm=norm,
            clip_coefficient=clip,
            norms=norms,
            n_samples=stepped.n_samples,
            n_target_tokens=round(tokens),
        )

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the gradient of the step in hand to a global norm.

        Returns:
            The norm before clipping and before the user's loss scale, 0-d.
        """
        if self._stepped is None:
            raise RuntimeError("there is no gradient to clip: call the model and backward first")
        self._stepped.clip_norm = max_norm
        return self._stepped.sums[1].sqrt()

    def discard(self) -> None:
        """Drops the gradient of a step that will not be applied."""
        self._stepped = None
        self.live.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and number of target tokens over all data ranks' batches, 0-d, equal on all ranks."""
        rows = batch["input_ids"].shape[0]
        batches = self.assembler.split(batch, math.gcd(rows, self.configuration.micro_batch_size))
        self.live.loss_scale = torch.ones((), device=self.device)
        loss = self.live.engine.forward_only(batches)
        at = self.coordinates
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if at.tensor == 0 and at.pipeline == self.layout.pipeline - 1:
            sums[0] = loss
            sums[1] = sum(b.n_targets for b in batches)
        dist.all_reduce(sums)
        return sums[0], sums[1]

    # -- switch ------------------------------------------------------------------------------------------------

    def switch(self, configuration: Configuration) -> SwitchReport:
        """Goes over to another configuration, with weights and the whole optimizer state.

        A change of batch or micro-batch alone rebuilds nothing. Not to be called between ``step`` and
        ``update``.
        """
        self.check(configuration)
        if self._stepped is not None:
            raise RuntimeError("a switch between backward and optimizer.step() would lose the gradient")
        changed = configuration.layout != self.layout
        report = SwitchReport(source=self.configuration, target=configuration, layout_changed=changed)
        started = time.perf_counter()
        if changed:
            groups = self._timed(report, "groups", lambda: self.groups.get(configuration.layout))
            self.live = self.assembler.switch(self.live, groups, report)
            self.groups.release([configuration.layout])
        self.configuration = configuration
        report.total_seconds = time.perf_counter() - started
        return report

    @staticmethod
    def _timed(report: SwitchReport, phase: str, work: Any) -> LayoutGroups:
        started = time.perf_counter()
        result = work()
        report.seconds[phase] = time.perf_counter() - started
        return result

    # -- state -------------------------------------------------------------------------------------------------

    def gather(self, key: str = "master") -> dict[str, torch.Tensor]:
        """Whole fp32 tensors of one state key (``master``, ``exp_avg``, …) or ``gradient``, on every rank.

        For tests and small models: the whole model is materialised.
        """
        return self.assembler.gather(self.live, key)

    def close(self) -> None:
        """Ends the live layout and every group that the engine made."""
        self.live.close()
        self.groups.close()


@dataclass
class _Stepped:
    sums: torch.Tensor
    norms: Any
    n_samples: int
    clip_norm: float | None
