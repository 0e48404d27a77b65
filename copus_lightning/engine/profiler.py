"""Measures step time and peak memory of layouts, micro-batches and accumulations in one process."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.profile import Infeasible, Measurement
from copus_lightning.engine.engine import Engine
from copus_lightning.engine.failures import OutOfMemory, SwitchFailed
from copus_lightning.engine.memory import resident_bytes

Progress = Callable[[Configuration, int, int], None]
"""Called with the configuration to be measured next, and how many of how many are behind."""


@dataclass
class Measured:
    """What a profile is made of; equal on all ranks.

    Attributes:
        measurements: One per layout, micro-batch and accumulation that ran.
        infeasible: Layouts and micro-batches that ran out of memory or could not be entered.
        switch_seconds: Median over the layout switches that were made, of the slowest rank; None if none was.
    """

    measurements: list[Measurement] = field(default_factory=list)
    infeasible: list[Infeasible] = field(default_factory=list)
    switch_seconds: float | None = None


def profile_engine(
    engine: Engine,
    vocab_size: int,
    sequence_length: int,
    layouts: Iterable[Layout],
    micro_batch_sizes: Iterable[int],
    accumulations: Iterable[int],
    repeats: int,
    warmup_steps: int,
    progress: Progress | None = None,
) -> Measured:
    """Runs every layout with every micro-batch and accumulation, on random token ids.

    Each layout is entered once, beginning with the one that is alive, so there are as few switches as can be.
    A step is forward, backward and update, from a moment at which all ranks meet; the slowest rank counts,
    and of the repeats the median. The learning rate is 0: the update does all its work, and the weights stay
    where random tokens would drive them away. Collective; the engine ends in the last layout.

    Args:
        engine: It must raise `OutOfMemory` rather than halve the micro-batch by itself.
        vocab_size: Token ids are drawn below it.
        sequence_length: Tokens per sample.
        layouts: Which to measure; all fit the world and the model.
        micro_batch_sizes: Samples per forward and backward of a data rank. When one runs out of memory, the
            larger ones are not tried in that layout.
        accumulations: Micro-batches per optimizer step and data rank.
        repeats: Timed steps per point.
        warmup_steps: Untimed steps before them.
        progress: Called on all ranks before each point.
    """
    wanted = dict.fromkeys(layouts)
    order = sorted(wanted, key=lambda layout: layout != engine.layout)
    micro_batch_sizes, accumulations = sorted(set(micro_batch_sizes)), sorted(set(accumulations))
    bench = _Bench(engine, vocab_size, sequence_length, repeats, warmup_steps)
    n_points = len(order) * len(micro_batch_sizes) * len(accumulations)
    found = Measured()
    for at_layout, layout in enumerate(order):
        refusal: str | None = None  # of every micro-batch from here on
        for at_micro, micro in enumerate(micro_batch_sizes):
            points = []
            done = (at_layout * len(micro_batch_sizes) + at_micro) * len(accumulations)
            for at, accumulation in enumerate(accumulations):
                configuration = Configuration(layout, layout.data * micro * accumulation, micro)
                if refusal is None and progress is not None:
                    progress(configuration, done + at, n_points)
                try:
                    if refusal is None:
                        points.append(bench.measure(configuration))
                except (OutOfMemory, SwitchFailed) as failure:
                    refusal = failure.reason
                    # More micro-batches in flight take more memory: what ran before is of no use to a run.
                    points = []
            found.measurements += points
            if not points:
                assert refusal is not None
                found.infeasible.append(Infeasible(layout, micro, refusal))
                refusal = f"larger than micro-batch {micro}, which cannot run"
    if bench.switches:
        found.switch_seconds = statistics.median(bench.slowest(bench.switches))
    return found


class _Bench:
    def __init__(
        self, engine: Engine, vocab_size: int, sequence_length: int, repeats: int, warmup_steps: int
    ) -> None:
        self.engine, self.device = engine, engine.device
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.repeats, self.warmup_steps = repeats, warmup_steps
        self.switches: list[float] = []
        self._meeting = torch.zeros(1, device=self.device)

    def measure(self, configuration: Configuration) -> Measurement:
        """One point; all ranks get the same."""
        report = self.engine.switch(configuration)
        if report.layout_changed:
            self.switches.append(report.total_seconds)
        # Tensor and pipeline peers take the same samples.
        generator = torch.Generator().manual_seed(self.engine.coordinates.data)
        shape = (configuration.data_rank_batch_size, self.sequence_length)
        batch = {"input_ids": torch.randint(self.vocab_size, shape, generator=generator)}
        with _peak_memory(self.device) as peak:
            for _ in range(self.warmup_steps):
                self._step(batch)
            seconds = [self._step(batch) for _ in range(self.repeats)]
        *seconds, peak_bytes = self.slowest([*seconds, *peak])
        return Measurement(
            configuration.layout,
            configuration.micro_batch_size,
            configuration.accumulation,
            statistics.median(seconds),
            round(peak_bytes),
        )

    def _step(self, batch: dict[str, torch.Tensor]) -> float:
        dist.all_reduce(self._meeting)
        self._synchronise()
        started = time.perf_counter()
        self.engine.step(batch)
        self.engine.update(learning_rate_factor=0.0)
        self._synchronise()
        return time.perf_counter() - started

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, values: list[float]) -> list[float]:
        """The largest over all ranks of each value."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()


@contextlib.contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[float]]:
    """Bytes in use at most within the block, as the one entry of a list once the block has ended.

    On a GPU what the allocator gave out; else the process's resident memory, by the kernel's high-water mark
    where that can be reset (Linux), or as it is at the end.
    """
    peak: list[float] = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.append(torch.cuda.max_memory_allocated(device))
        return
    resets = False
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        resets = True
    yield peak
    lines = Path("/proc/self/status").read_text().splitlines() if resets else []
    marks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    peak.append(max([resident_bytes(), *marks]))
