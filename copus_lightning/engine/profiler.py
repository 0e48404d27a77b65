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
    largest_batch: int | None = None,
) -> Measured:
    """Runs every layout with every micro-batch and accumulation, on random token ids; see `points`.

    Each layout is entered once, beginning with the one that is alive, so there are as few switches as can be.
    Within a layout all points are measured in turn, round after round, since a change of micro-batch costs
    nothing: what slows the machine for a while then touches one repeat of each point, not all of one, and the
    median leaves it out. A step is forward, backward and update, from a moment at which all ranks meet; the
    slowest rank counts. The learning rate is 0: the update does all its work, and the weights stay where random
    tokens would drive them away. Collective; the engine ends in the last layout.

    Args:
        engine: It must raise `OutOfMemory` rather than halve the micro-batch by itself.
        vocab_size: Token ids are drawn below it.
        sequence_length: Tokens per sample.
        layouts: Which to measure; all fit the world and the model.
        micro_batch_sizes: Samples per forward and backward of a data rank. When one runs out of memory, the
            larger ones are not tried in that layout.
        accumulations: Micro-batches per optimizer step and data rank.
        repeats: Timed rounds.
        warmup_steps: Untimed rounds before them.
        progress: Called on all ranks before each step.
        largest_batch: Largest global batch that a run would use, samples; None measures all.
    """
    wanted = dict.fromkeys(layouts)
    order = sorted(wanted, key=lambda layout: layout != engine.layout)
    micro_batch_sizes = sorted(set(micro_batch_sizes))
    bench = _Bench(engine, vocab_size, sequence_length)
    by_layout = {layout: points(layout, micro_batch_sizes, accumulations, largest_batch) for layout in order}
    n_rounds = warmup_steps + repeats
    n_steps = n_rounds * sum(map(len, by_layout.values()))
    found = Measured()
    done = 0
    for layout, its_points in by_layout.items():
        seconds: dict[Configuration, list[float]] = {point: [] for point in its_points}
        peaks = dict.fromkeys(its_points, 0.0)
        refused: dict[int, str] = {}
        for round_number in range(n_rounds):
            for point in its_points:
                done += 1
                if point.micro_batch_size in refused:
                    continue
                if progress is not None:
                    progress(point, done - 1, n_steps)
                try:
                    step_seconds, peak_bytes = bench.step(point)
                except (OutOfMemory, SwitchFailed) as failure:
                    refused |= _refusals(micro_batch_sizes, point.micro_batch_size, failure)
                    continue
                peaks[point] = max(peaks[point], peak_bytes)
                if round_number >= warmup_steps:
                    seconds[point].append(step_seconds)
        found.infeasible += [Infeasible(layout, micro, reason) for micro, reason in refused.items()]
        for point in its_points:
            # With more micro-batches in flight it takes more memory: then the points that ran are of no use.
            if point.micro_batch_size not in refused:
                *slowest, peak_bytes = bench.slowest([*seconds[point], peaks[point]])
                found.measurements.append(
                    Measurement(
                        layout,
                        point.micro_batch_size,
                        point.accumulation,
                        statistics.median(slowest),
                        round(peak_bytes),
                    )
                )
    if bench.switches:
        found.switch_seconds = statistics.median(bench.slowest(bench.switches))
    return found


def points(
    layout: Layout, micro_batch_sizes: Iterable[int], accumulations: Iterable[int], largest_batch: int | None
) -> list[Configuration]:
    """What is measured of a layout, small micro-batches first: what runs out of memory spares the larger ones.

    Every micro-batch with every accumulation, but for what no run would be in, as long as others are left for a
    fit: one micro-batch per step, where no noise scale can be measured (and where the stages of a pipeline never
    work at the same time, which makes it faster than a fit to the others says), and batches beyond the largest.
    """
    chosen = []
    for micro in sorted(set(micro_batch_sizes)):
        counts = sorted(set(accumulations))
        if len(counts) > 2 and layout.data * counts[0] == 1:
            counts = counts[1:]
        while (
            len(counts) > 3 and largest_batch is not None and layout.data * micro * counts[-1] > largest_batch
        ):
            counts.pop()
        chosen += [Configuration(layout, layout.data * micro * count, micro) for count in counts]
    return chosen


def _refusals(
    micro_batch_sizes: list[int], failed: int, failure: OutOfMemory | SwitchFailed
) -> dict[int, str]:
    """Which micro-batches are not to be tried any more, with the reason."""
    larger = f"larger than micro-batch {failed}, which ran out of memory"
    if isinstance(failure, SwitchFailed):  # the layout cannot be entered at all
        larger = failure.reason
    return {
        micro: failure.reason if micro == failed else larger for micro in micro_batch_sizes if micro >= failed
    }


class _Bench:
    def __init__(self, engine: Engine, vocab_size: int, sequence_length: int) -> None:
        self.engine, self.device = engine, engine.device
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.switches: list[float] = []
        self._meeting = torch.zeros(1, device=self.device)

    def step(self, configuration: Configuration) -> tuple[float, float]:
        """Seconds and peak memory, in bytes, of one step on this rank; enters the configuration before it."""
        report = self.engine.switch(configuration)
        if report.layout_changed:
            self.switches.append(report.total_seconds)
        # Tensor and pipeline peers take the same samples.
        generator = torch.Generator().manual_seed(self.engine.coordinates.data)
        shape = (configuration.data_rank_batch_size, self.sequence_length)
        batch = {"input_ids": torch.randint(self.vocab_size, shape, generator=generator)}
        with _peak_memory(self.device) as peak:
            dist.all_reduce(self._meeting)
            self._synchronise()
            started = time.perf_counter()
            self.engine.step(batch)
            self.engine.update(learning_rate_factor=0.0)
            self._synchronise()
            seconds = time.perf_counter() - started
        return seconds, peak[0]

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
