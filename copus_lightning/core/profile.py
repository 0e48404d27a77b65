"""Throughput of configurations: measured once, fitted over the accumulation, corrected while training.

| part            | what it holds                                                                    |
|-----------------|----------------------------------------------------------------------------------|
| `Measurement`   | median step time and peak memory of a layout, micro-batch and accumulation       |
| `Infeasible`    | a layout and micro-batch that cannot run here, with the reason                   |
| `Profile`       | both, for one model on one machine; predicts step time and samples per second    |

The file format is described in docs/profile.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from copus_lightning.core import profile_format
from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.step_time import LiveCorrection, Pair, StepTimeFit, fit_step_time


@dataclass(frozen=True)
class Measurement:
    """One measured point.

    Args:
        layout: The layout that ran.
        micro_batch_size: Samples of one micro-batch.
        accumulation: Micro-batches per optimizer step and data rank.
        step_seconds: Median wall time of an optimizer step, slowest rank.
        peak_memory_bytes: Largest over the ranks; None where it cannot be told apart from other use.
    """

    layout: Layout
    micro_batch_size: int
    accumulation: int
    step_seconds: float
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Infeasible:
    """A layout and micro-batch that cannot run, with the reason in one line."""

    layout: Layout
    micro_batch_size: int
    reason: str


@dataclass
class Profile:
    """Measured throughput of one model on one machine.

    Args:
        model: Fingerprint of what was measured (sizes, precision, sequence length, ...): plain JSON values.
        hardware: Fingerprint of where (device, ranks per node, threads, ...): plain JSON values.
        world_size: Ranks that every layout takes.
        measurements: Points, no two of the same layout, micro-batch and accumulation. Add with `add`.
        infeasible: What cannot run; wins over a measurement. Add with `mark_infeasible`.
        switch_seconds: Median cost of a layout switch, None if not measured: the expectation of a run that
            has not switched yet.
        live: The correction of the fits by steps that were observed in training; not part of the file.
        source: Starts the error messages; the path of a loaded file. Not part of the file.

    Raises:
        ValueError: If anything breaks the format; see docs/profile.md.
    """

    model: dict[str, Any]
    hardware: dict[str, Any]
    world_size: int
    measurements: list[Measurement] = field(default_factory=list)
    infeasible: list[Infeasible] = field(default_factory=list)
    switch_seconds: float | None = None
    live: LiveCorrection = field(default_factory=LiveCorrection, compare=False)
    source: str = field(default="profile", compare=False)
    _fits: dict[Pair, StepTimeFit] = field(default_factory=dict, repr=False, compare=False)
    _n_fitted: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        profile_format.check(self.to_dict(), self.source)

    # -- file ------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file.

        Raises:
            ValueError: If the file is missing or breaks the format; one line naming file and key.
        """
        document = profile_format.read(path)
        return cls(
            model=document["model"],
            hardware=document["hardware"],
            world_size=document["world_size"],
            measurements=[Measurement(**entry) for entry in document["measurements"]],
            infeasible=[Infeasible(**entry) for entry in document["infeasible"]],
            switch_seconds=document["switch_seconds"],
            source=str(path),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile file, whole or not at all. The live correction is not part of it."""
        profile_format.write(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The document that `save` writes."""
        return {
            "format": profile_format.FORMAT,
            "model": self.model,
            "hardware": self.hardware,
            "world_size": self.world_size,
            "switch_seconds": self.switch_seconds,
            "measurements": [{**vars(point), "layout": str(point.layout)} for point in self.measurements],
            "infeasible": [{**vars(entry), "layout": str(entry.layout)} for entry in self.infeasible],
        }

    def check(
        self,
        model: Mapping[str, Any] | None = None,
        hardware: Mapping[str, Any] | None = None,
        world_size: int | None = None,
    ) -> None:
        """Refuse a profile of something else; what is None is not compared.

        Raises:
            ValueError: One line saying what differs, and to measure anew.
        """
        if world_size is not None and world_size != self.world_size:
            raise ValueError(
                f"{self.source}: measured with {self.world_size} ranks, this run has {world_size}:"
                " measure anew with `copus profile`"
            )
        for what, mine, theirs in (("model", self.model, model), ("hardware", self.hardware, hardware)):
            if theirs is None:
                continue
            # As JSON: a tuple equals the list that it was read back as.
            mine, theirs = (json.loads(json.dumps(dict(side), default=str)) for side in (mine, theirs))
            differences = [
                f"{key} was {_shown(mine, key)}, is {_shown(theirs, key)}"
                for key in sorted({*mine, *theirs})
                if _shown(mine, key) != _shown(theirs, key)
            ]
            if differences:
                raise ValueError(
                    f"{self.source}: measured with another {what} ({'; '.join(differences)}):"
                    " measure anew with `copus profile`"
                )

    # -- what can run ----------------------------------------------------------------------------------------

    def add(self, measurement: Measurement) -> None:
        """Add a measured point.

        Raises:
            ValueError: If the point is not valid or was measured already.
        """
        self.measurements.append(measurement)
        try:
            profile_format.check(self.to_dict(), self.source)
        except ValueError:
            self.measurements.pop()
            raise

    def mark_infeasible(self, layout: Layout, micro_batch_size: int, reason: str) -> None:
        """Exclude a layout and micro-batch from now on; a later reason replaces an earlier one."""
        one_line = " ".join(reason.split())
        kept = [e for e in self.infeasible if (e.layout, e.micro_batch_size) != (layout, micro_batch_size)]
        self.infeasible = [*kept, Infeasible(layout, micro_batch_size, one_line)]

    def pairs(self) -> list[Pair]:
        """Measured and feasible layouts with their micro-batches, in the order of the measurements."""
        refused = {(entry.layout, entry.micro_batch_size) for entry in self.infeasible}
        measured = dict.fromkeys((point.layout, point.micro_batch_size) for point in self.measurements)
        return [pair for pair in measured if pair not in refused]

    def is_feasible(self, configuration: Configuration) -> bool:
        """Whether the configuration's layout and micro-batch were measured and not marked infeasible."""
        return (configuration.layout, configuration.micro_batch_size) in self.pairs()

    def is_measured(self, layout: Layout, micro_batch_size: int) -> bool:
        """Whether the step time of the layout and micro-batch can be predicted, feasible or not."""
        return (layout, micro_batch_size) in self._measured()

    def configurations(self, global_batch_sizes: Iterable[int]) -> list[Configuration]:
        """Every feasible configuration: measured layouts and micro-batches times the batches that divide."""
        sizes = sorted(set(global_batch_sizes))
        return [
            Configuration(layout, size, micro)
            for layout, micro in self.pairs()
            for size in sizes
            if size % (layout.data * micro) == 0
        ]

    # -- prediction ------------------------------------------------------------------------------------------

    def fit(self, layout: Layout, micro_batch_size: int) -> StepTimeFit:
        """The step-time fit of a layout and micro-batch.

        Raises:
            ValueError: If it was not measured.
        """
        if self._n_fitted != len(self.measurements):
            self._fits, self._n_fitted = {}, len(self.measurements)
        pair = (layout, micro_batch_size)
        if pair not in self._fits:
            points = sorted(
                (point.accumulation, point.step_seconds)
                for point in self.measurements
                if (point.layout, point.micro_batch_size) == pair
            )
            if not points:
                raise ValueError(
                    f"{self.source}: {layout} with micro_batch_size={micro_batch_size} was not measured:"
                    " measure it with `copus profile` or choose one that was"
                )
            self._fits[pair] = fit_step_time(points)
        return self._fits[pair]

    def step_seconds(self, configuration: Configuration) -> float:
        """Fitted seconds of an optimizer step, without the live correction.

        Raises:
            ValueError: If the configuration's layout and micro-batch were not measured.
        """
        fit = self.fit(configuration.layout, configuration.micro_batch_size)
        return fit.step_seconds(configuration.accumulation)

    def throughput(self, configuration: Configuration) -> float:
        """Predicted samples per second of the whole world, with the live correction.

        Raises:
            ValueError: If the configuration's layout and micro-batch were not measured.
        """
        ratio = self.correction(configuration.layout, configuration.micro_batch_size)
        return configuration.global_batch_size / (self.step_seconds(configuration) * ratio)

    # -- live correction -------------------------------------------------------------------------------------

    def observe(self, configuration: Configuration, step_seconds: float) -> None:
        """Take in the wall time of a training step; a configuration that was not measured has no ratio."""
        pair = (configuration.layout, configuration.micro_batch_size)
        if 0 < step_seconds < math.inf and self.is_measured(*pair):
            self.live.observe(pair, step_seconds / self.step_seconds(configuration))

    def correction(self, layout: Layout, micro_batch_size: int) -> float:
        """Factor on the fitted step time: above 1 if steps take longer than measured, 1 before any step."""
        return self.live.ratio((layout, micro_batch_size))

    def state_dict(self) -> dict[str, Any]:
        """What a run has learned: live corrections and what it found infeasible. Plain JSON types."""
        return {
            "measurements_digest": self._digest(),
            "live": self.live.state_dict(),
            "infeasible": self.to_dict()["infeasible"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Ratios to another profile's fit mean nothing here, and are left out."""
        for entry in state["infeasible"]:
            self.mark_infeasible(Layout.parse(entry["layout"]), entry["micro_batch_size"], entry["reason"])
        if state["measurements_digest"] == self._digest():
            self.live.load_state_dict(state["live"])

    # -- for people ------------------------------------------------------------------------------------------

    def table(self) -> str:
        """An aligned table of the fits, one line per layout and micro-batch, then what cannot run.

        `limit/s` is the throughput at ever more accumulation, `d * B_m / beta`; `error` the fit's largest
        relative error on a measured accumulation that was left out of it; then the measured samples/s.
        """
        counts = sorted({point.accumulation for point in self.measurements})
        titles = ["layout", "micro", "alpha s", "beta s", "error", "limit/s", "peak MiB"]
        rows = [[*titles, *(f"n={n}" for n in counts)]]
        for layout, micro in self._measured():
            points = [p for p in self.measurements if (p.layout, p.micro_batch_size) == (layout, micro)]
            fit = self.fit(layout, micro)
            rate = {p.accumulation: layout.data * micro * p.accumulation / p.step_seconds for p in points}
            peaks = [p.peak_memory_bytes for p in points if p.peak_memory_bytes is not None]
            rows.append(
                [
                    str(layout),
                    str(micro),
                    f"{fit.alpha_seconds:.4f}",
                    f"{fit.beta_seconds:.4f}",
                    "-" if fit.left_out_error is None else f"{fit.left_out_error:.1%}",
                    f"{layout.data * micro / fit.beta_seconds:.1f}" if fit.beta_seconds > 0 else "-",
                    f"{max(peaks) / 2**20:.0f}" if peaks else "-",
                    *(f"{rate[n]:.1f}" if n in rate else "-" for n in counts),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        for entry in self.infeasible:
            lines.append(f"{entry.layout}  micro-batch {entry.micro_batch_size} cannot run: {entry.reason}")
        return "\n".join(lines)

    def _measured(self) -> list[Pair]:
        return list(dict.fromkeys((point.layout, point.micro_batch_size) for point in self.measurements))

    def _digest(self) -> str:
        text = json.dumps(self.to_dict()["measurements"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    return json.dumps(fingerprint[key], sort_keys=True) if key in fingerprint else "absent"
