"""The records of a run as columns, and what they are drawn against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_LAYOUT_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


@dataclass
class RunRecords:
    """The records of one run, as columns.

    Args:
        name: Heads the figures.
        rows: One per step, see `records.METRICS`.
        validations: Of kind "validation", with `tokens`, `seconds` and `val_loss`.
        failures: Of kind "switch_failed", with `step`.
        critical_batch_coefficient: c, maps the noise scale to the critical batch.
    """

    name: str
    rows: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    critical_batch_coefficient: float
    layouts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.layouts = list(dict.fromkeys(row["layout"] for row in self.rows))

    def column(self, name: str) -> list[float]:
        """One value per step; not a number where the record is empty."""
        return [math.nan if row[name] is None else float(row[name]) for row in self.rows]

    def colour(self, layout: str, dark: bool = False) -> tuple[float, float, float]:
        """Red, green and blue from 0 to 1, the same in every figure of the run; `dark` for text."""
        colour = to_rgb(_LAYOUT_COLOURS[self.layouts.index(layout) % len(_LAYOUT_COLOURS)])
        red, green, blue = (0.7 * part if dark else part for part in colour)
        return red, green, blue

    def runs(self, key: Callable[[dict[str, Any]], Any]) -> list[tuple[int, int]]:
        """Ranges `(first, last)` of consecutive rows with an equal key."""
        starts = [i for i, row in enumerate(self.rows) if i == 0 or key(row) != key(self.rows[i - 1])]
        return list(zip(starts, [start - 1 for start in starts[1:]] + [len(self.rows) - 1], strict=True))

    def smooth(self, name: str, restart: Callable[[dict[str, Any]], Any] | None = None) -> list[float]:
        """A column averaged over tokens, forwards and backwards; the half-life is a hundredth of the run.

        Tokens rather than steps: a step of a large batch says more. Both directions, so that the average does
        not lag behind. Where `restart` changes, the average starts anew, since a rate must not be averaged
        over two configurations.
        """
        tokens = [row["tokens"] for row in self.rows]
        half_life = tokens[-1] / min(100, 1 + len(tokens) / 4)  # a short run: four steps
        weights = [1 - 0.5 ** ((after - before) / half_life) for before, after in pairwise([0, *tokens])]
        values = self.column(name)
        smoothed: list[float] = []
        for first, last in self.runs(restart or (lambda row: None)):
            part, shares = values[first : last + 1], weights[first : last + 1]
            forwards = _average(part, shares)
            backwards = _average(part[::-1], shares[::-1])[::-1]
            smoothed += [(a + b) / 2 for a, b in zip(forwards, backwards, strict=True)]
        return smoothed


def configuration(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a switch changes."""
    return row["layout"], row["global_batch_size"], row["micro_batch_size"]


def _average(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Debiased exponential average; a value that is not finite leaves it as it was."""
    averages, total, known = [], 0.0, 0.0
    for value, weight in zip(values, weights, strict=True):
        if math.isfinite(value):
            total += weight * (value - total)
            known += weight * (1 - known)
        averages.append(total / known if known else math.nan)
    return averages


class Axis:
    """What runs from left to right: values of rows and of events, and how they are written."""

    label: str

    def __init__(self, records: RunRecords) -> None:
        self.last = records.rows[-1]

    def of(self, record: dict[str, Any]) -> float:
        raise NotImplementedError

    def finish(self, axes: Axes) -> None:
        axes.set_xlim(0, self.of(self.last))
        axes.set_xlabel(self.label)


class TimeAxis(Axis):
    def __init__(self, records: RunRecords) -> None:
        super().__init__(records)
        seconds = self.last["seconds"]
        self.unit, name = (1, "s") if seconds < 300 else (60, "min") if seconds < 3 * 3600 else (3600, "h")
        self.label = f"time ({name})"

    def of(self, record: dict[str, Any]) -> float:
        return record["seconds"] / self.unit


class TokenAxis(Axis):
    label = "tokens"

    def of(self, record: dict[str, Any]) -> float:
        return float(record["tokens"])

    def finish(self, axes: Axes) -> None:
        super().finish(axes)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
