"""Draws a run directory from its records: loss, batch and layout, noise scale, throughput and Goodput.

| file                | shows                                                                        |
|---------------------|------------------------------------------------------------------------------|
| `overview.png`      | the four below at a glance                                                   |
| `loss.png`          | training and validation loss against time and against tokens                 |
| `configuration.png` | global batch, micro-batch and layout over time                               |
| `noise_scale.png`   | noise scale and critical batch against tokens, with the batch that was used  |
| `throughput.png`    | samples per second and Goodput, predicted and realised, over time            |

In all of them the background shows the layout, and dotted lines mark the switches: coloured where the layout
changed, grey where the batch or the micro-batch alone did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from copus_lightning.core.goodput import DEFAULT_COEFFICIENT
from copus_lightning.core.records import read_events, read_metrics
from copus_lightning.plots import panels
from copus_lightning.plots.series import RunRecords, TimeAxis, TokenAxis, duration, short

__all__ = ["draw_run"]

_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#6b7280",
    "axes.labelcolor": panels.INK,
    "axes.grid": True,
    "grid.color": "#d7dbe2",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}
_DPI = 150


def draw_run(
    run_dir: str | os.PathLike[str], critical_batch_coefficient: float = DEFAULT_COEFFICIENT
) -> list[Path]:
    """Draw all figures into the run directory.

    Args:
        run_dir: Holds metrics.csv and events.jsonl.
        critical_batch_coefficient: c of the run, for the critical batch `c * phi`.

    Returns:
        The files written, the overview first; none for a run without a step.

    Raises:
        ValueError: If there are no records, or they cannot be read.
    """
    directory = Path(run_dir)
    rows = read_metrics(directory)
    if not rows:
        return []
    # A validation that a resume undid is made again, or lies beyond the last step.
    events = read_events(directory, "validation")
    validations = {event["step"]: event for event in events if event["val_loss"] is not None}
    records = RunRecords(
        name=directory.resolve().name,
        rows=rows,
        validations=[validations[step] for step in sorted(validations) if step <= rows[-1]["step"]],
        failures=read_events(directory, "switch_failed"),
        critical_batch_coefficient=critical_batch_coefficient,
    )
    time, tokens = TimeAxis(records), TokenAxis(records)
    grids: dict[str, tuple[tuple[int, int], tuple[float, float], list[Callable[[Axes], None]]]] = {
        "overview": (
            (2, 2),
            (11.5, 7.2),
            [
                lambda axes: panels.loss(axes, records, time),
                lambda axes: panels.batch(axes, records, time),
                lambda axes: panels.noise_scale(axes, records, tokens),
                lambda axes: panels.throughput(axes, records, time),
            ],
        ),
        "loss": (
            (1, 2),
            (11.5, 4.0),
            [lambda axes: panels.loss(axes, records, time), lambda axes: panels.loss(axes, records, tokens)],
        ),
        "configuration": (
            (2, 1),
            (9.5, 5.4),
            [lambda axes: panels.batch(axes, records, time), lambda axes: panels.layout(axes, records, time)],
        ),
        "noise_scale": ((1, 1), (9.5, 4.2), [lambda axes: panels.noise_scale(axes, records, tokens)]),
        "throughput": ((1, 1), (9.5, 4.2), [lambda axes: panels.throughput(axes, records, time)]),
    }
    return [_draw(directory / f"{name}.png", records, *grid) for name, grid in grids.items()]


def _draw(
    path: Path,
    records: RunRecords,
    shape: tuple[int, int],
    size: tuple[float, float],
    drawings: Sequence[Callable[[Axes], None]],
) -> Path:
    # A figure of its own rather than pyplot's: no backend, style or open figure stays behind in the process.
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_headline(records), x=0.012, ha="left", fontsize=10, color=panels.INK)
        # A panel that stands below another repeats its axis and needs less room; a square grid is even.
        heights = [2, 1] if shape == (2, 1) else None
        grid = figure.subplots(*shape, squeeze=False, height_ratios=heights)
        for draw, axes in zip(drawings, grid.flat, strict=True):
            draw(axes)
        figure.savefig(path, dpi=_DPI, facecolor="white")
    return path


def _headline(records: RunRecords) -> str:
    first, last = records.rows[0], records.rows[-1]
    loss = f", validation loss {records.validations[-1]['val_loss']:.3f}" if records.validations else ""
    return (
        f"{records.name}: batch {first['global_batch_size']} in {first['layout']} to"
        f" {last['global_batch_size']} in {last['layout']}"
        f"{loss} after {short(last['tokens'])} tokens and {duration(last['seconds'])}"
    )
