"""One model, one layout alive at a time: measure, step, switch.

The engine knows nothing of Lightning. Its two faces (:mod:`copus_lightning.strategies`) call :meth:`Engine.step`
for the forward and backward passes of one optimizer step, :meth:`Engine.update` for the optimizer step, and
:meth:`Engine.switch` between two of them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from copus_lightning.core.layout import Configuration, Coordinates, Layout
from copus_lightning.core.noise import StepNorms
from copus_lightning.engine.agreement import Agreement
from copus_lightning.engine.backend import load_deepspeed
from copus_lightning.engine.failures import (
    OutOfMemory,
    RankLost,
    StepFailed,
    SwitchFailed,
    describe,
    log_traceback,
)
from copus_lightning.engine.groups import GroupCache
from copus_lightning.engine.memory import switch_peak_bytes, way_back_bytes
from copus_lightning.engine.recovery import Recovery
from copus_lightning.engine.settings import EngineSettings
from copus_lightning.engine.switching import Laps, Preparation, Switch, SwitchReport

if TYPE_CHECKING:
    from copus_lightning.engine.assembly import Live

__all__ = [
    "Engine",
    "EngineSettings",
    "OutOfMemory",
    "RankLost",
    "Reduction",
    "StepFailed",
    "StepOutcome",
    "SwitchFailed",
    "SwitchReport",
]


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


@dataclass(frozen=True)
class Reduction:
    """A micro-batch that ran out of memory, and what replaced it.

    Attributes:
        configuration: What did not fit.
        replacement: The same layout and global batch with a smaller micro-batch.
        reason: One line that names the rank.
    """

    configuration: Configuration
    replacement: Configuration
    reason: str


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
        automatic_micro_batch: Rerun a step that ran out of memory with a smaller micro-batch (and the same
            samples and global batch) instead of raising :class:`OutOfMemory`.

    Attributes:
        configuration: What the next step runs in.
        live: The layout that is alive.
        measure_next: Measure the gradient norms of the next step.
        probe_seconds: What the last measurement cost on this rank.
        reductions: Micro-batches that ran out of memory, newest last; whoever reads them clears them.
        fault: Called with the name of each phase of a step or a switch before it begins; what it raises is
            handled like a failure of the phase. For tests.
        tamper: Called with a copy of each message before it is sent in a switch. For tests.

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
        automatic_micro_batch: bool = True,
    ) -> None:
        load_deepspeed(device)
        from copus_lightning.engine.assembly import Assembler

        self.settings, self.device = settings, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.assembler = Assembler(model, optimizer, settings, device, seed)
        self.check(configuration)
        # Nothing was changed so far; from here on nothing is refused.
        self.groups = GroupCache(settings.cache_groups, settings.timeout_seconds)
        self.agreement = Agreement(settings.timeout_seconds)
        self.recovery = Recovery(self)
        self.configuration = configuration
        self.automatic_micro_batch = automatic_micro_batch
        self.measure_next = False
        self.probe_seconds = 0.0
        self.reductions: list[Reduction] = []
        self.fault: Callable[[str], None] = lambda phase: None
        self.tamper: Callable[[torch.Tensor], None] | None = None
        self.live: Live | None = self.assembler.first(self.groups.get(configuration.layout))
        self._stepped: _Stepped | None = None
        self._preparation: Preparation | None = None
        self._n_preparations = 0
        self._has_state = False

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

    @property
    def in_step(self) -> bool:
        """Whether there is a gradient that no optimizer step has used yet."""
        return self._stepped is not None

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
        measured, self.measure_next = self.measure_next, False
        while True:
            try:
                self._stepped = self._attempt(batch, measured)
                return self._stepped.sums[0].float()
            except Exception as error:
                log_traceback(error, self.rank)
                failure = describe(error, self.rank)
            reason = self.recovery.undo_step(failure)
            if not self.automatic_micro_batch:
                raise OutOfMemory(reason)
            self._reduce_micro_batch(reason)

    def _attempt(self, batch: Mapping[str, torch.Tensor], measured: bool) -> _Stepped:
        live, at = self._alive, self.coordinates
        batches = self.assembler.split(batch, self.configuration.micro_batch_size)
        total = torch.stack([b.n_targets for b in batches]).sum()
        if self.layout.data > 1:
            dist.all_reduce(total, group=live.groups.data)
        live.loss_scale = torch.where(total > 0, 1.0 / total.clamp(min=1), 0.0).float()

        probe = live.probe
        if measured:
            probe.attach([b.input_ids for b in batches], [b.n_targets for b in batches], total)
        live.engine.on_micro_batch = self._on_micro_batch(measured)
        try:
            loss = live.engine.forward_backward(batches)
            weighted = probe.detach() if measured else None
        finally:
            live.engine.on_micro_batch = None
            probe.abandon()

        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        if at.tensor == 0 and at.pipeline == self.layout.pipeline - 1:
            sums[0] = loss
        square = sums[1] = live.squared_gradient_norm()
        speaks = at.tensor == 0 and at.pipeline == 0
        if speaks:
            sums[2] = total / self.layout.data
        dist.all_reduce(sums, group=live.groups.world)
        self.recovery.finish_device_work()
        norms = None
        if weighted is not None:
            started = time.perf_counter()
            norms = live.norms
            norms.reset()
            shares = torch.zeros(5, dtype=torch.float64, device=self.device)
            shares[0], shares[1] = weighted, square
            if speaks:
                shares[2] = torch.stack([b.n_targets > 0 for b in batches]).sum()
                shares[3] = total / self.layout.data
                shares[4] = batch["input_ids"].shape[0]
            norms.update(shares)
            self.probe_seconds = probe.seconds + time.perf_counter() - started
        return _Stepped(
            sums=sums,
            norms=norms,
            n_samples=self.configuration.global_batch_size,
            clip_norm=self.settings.gradient_clip_norm,
        )

    def _on_micro_batch(self, measured: bool) -> Callable[[int], None]:
        probe = self._alive.probe

        def done(index: int) -> None:
            self.fault("micro-batch")
            if measured:
                probe.micro_batch_done(index)

        return done

    @property
    def _alive(self) -> Live:
        if self.live is None:
            raise RuntimeError("the engine is closed")
        return self.live

    def _reduce_micro_batch(self, reason: str) -> None:
        now = self.configuration
        smaller = [m for m in range(1, now.micro_batch_size) if now.data_rank_batch_size % m == 0]
        if not smaller:
            raise OutOfMemory(f"{reason}; the micro-batch is 1 already, use more tensor or pipeline ranks")
        half = [m for m in smaller if m <= now.micro_batch_size // 2]
        replacement = Configuration(now.layout, now.global_batch_size, max(half or smaller))
        self.reductions.append(Reduction(now, replacement, reason))
        self.configuration = replacement

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
            self._alive.optimizer.scale_gradients(clip * gradient_scale)
            self._alive.optimizer.step(learning_rate_factor)
            self._has_state = True
        else:
            norms = None
            self._alive.optimizer.zero_grad()
        self.agreement.progress += 1
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
        self._alive.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and number of target tokens over all data ranks' batches, 0-d, equal on all ranks."""
        rows = batch["input_ids"].shape[0]
        batches = self.assembler.split(batch, math.gcd(rows, self.configuration.micro_batch_size))
        self._alive.loss_scale = torch.ones((), device=self.device)
        loss = self._alive.engine.forward_only(batches)
        at = self.coordinates
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if at.tensor == 0 and at.pipeline == self.layout.pipeline - 1:
            sums[0] = loss
            sums[1] = torch.stack([b.n_targets for b in batches]).sum()
        dist.all_reduce(sums, group=self._alive.groups.world)
        return sums[0], sums[1]

    # -- switch ------------------------------------------------------------------------------------------------

    def prepare(self, configuration: Configuration) -> None:
        """Begins to prepare another layout in a helper thread, while training goes on in this one.

        A switch to the same configuration then makes use of it.
        """
        self.check(configuration)
        if configuration.layout != self.layout:
            self._preparation = self._prepare(configuration)

    @property
    def prepared(self) -> bool:
        """Whether the preparation that was begun last has ended on this rank."""
        return self._preparation is not None and self._preparation.finished

    def _prepare(self, configuration: Configuration, pause: Laps | None = None) -> Preparation:
        if self._preparation is not None:
            self._preparation.drop()
        self._n_preparations += 1
        return Preparation(self, configuration, self._n_preparations, pause)

    def settle_preparation(self) -> None:
        """To be called before a process group is made elsewhere: ranks must make them all in the same order."""
        if self._preparation is not None:
            self._preparation.settle()

    def switch(self, configuration: Configuration) -> SwitchReport:
        """Goes over to another configuration, with weights and the whole optimizer state.

        A change of batch or micro-batch alone rebuilds nothing. Not to be called between ``step`` and
        ``update``.

        Raises:
            ValueError: The configuration does not fit; nothing was changed.
            SwitchFailed: Some rank failed; all are in the old configuration, with bit-identical state.
            RankLost: Some rank is gone.
        """
        self.check(configuration)
        if self._stepped is not None:
            raise RuntimeError("a switch between backward and optimizer.step() would lose the gradient")
        changed = configuration.layout != self.layout
        report = SwitchReport(self.configuration, configuration, changed)
        if changed:
            laps = Laps()
            preparation = self._preparation
            if preparation is None or not preparation.is_for(self.layout, configuration.layout):
                preparation = self._prepare(configuration, laps)
            self._preparation = None
            report.overlapped = preparation.overlapped
            self.live = Switch(self, preparation, report, laps).run()
            self.groups.release([configuration.layout])
            laps.end("free")
            report.seconds = preparation.laps.seconds | laps.seconds
            report.total_seconds = laps.total_seconds
        self.configuration = configuration
        return report

    @property
    def has_state(self) -> bool:
        """Whether an optimizer step was made, so that there are moments."""
        return self._has_state

    def replaced_state(self, has_state: bool) -> None:
        """To be called on all ranks once masters and moments were overwritten, as by a checkpoint.

        Args:
            has_state: Whether there are moments now.
        """
        if self._preparation is not None and not has_state:  # it may have made room for moments
            self._preparation.drop()
            self._preparation = None
        self._has_state = has_state

    @property
    def one_by_one(self) -> bool:
        """Whether a switch carries one state key after the other."""
        wish = self.settings.one_by_one
        return self.device.type != "cpu" if wish is None else wish

    def has_room(self, target: Layout) -> bool:
        """Whether the device can hold all that a switch to ``target`` needs there at a time.

        If not, the old pieces wait in host memory.
        """
        if self.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        before, after = (self.assembler.sizes(layout, self._has_state) for layout in (self.layout, target))
        needed = switch_peak_bytes(before, after, self.one_by_one) + self.settings.buffer_bytes
        masters_are_weights = self.settings.dtype == torch.float32
        if masters_are_weights:
            # Masters are views of the weights here, which stay as a whole until the masters have travelled.
            needed += max(0, before.weights // 2 - after.state)
        needed = max(needed, way_back_bytes(before, masters_are_weights))
        return free + unused + before.nbytes > needed

    # -- state -------------------------------------------------------------------------------------------------

    def gather(self, key: str = "master") -> dict[str, torch.Tensor]:
        """Whole fp32 tensors of one state key (``master``, ``exp_avg``, …) or ``gradient``, on every rank.

        For tests and small models: the whole model is materialised.
        """
        return self.assembler.gather(self._alive, key)

    def take_down(self) -> None:
        """Ends the live layout and closes this rank's connections, so that nobody waits for it."""
        if self.live is not None:
            self.live.close()
            self.live = None
        if self._preparation is not None:
            self._preparation.drop()
            self._preparation = None
        self.assembler.reset_globals()
        self.groups.close()
        gc.collect()

    def close(self) -> None:
        """Ends the live layout and every group that the engine made."""
        self.take_down()
        self.recovery.close()
        self.agreement.close()


@dataclass
class _Stepped:
    sums: torch.Tensor
    norms: Any
    n_samples: int
    clip_norm: float | None
