"""The panels of the figures; each draws records on given axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from copus_lightning.plots.series import Axis, RunRecords, configuration

INK = "#1f2430"
_FAINT, _RED, _BLUE, _GREEN = "#8b95a5", "#D55E00", "#0072B2", "#00805e"


def loss(axes: Axes, records: RunRecords, axis: Axis) -> None:
    x = [axis.of(row) for row in records.rows]
    axes.set_title("Loss")
    axes.set_ylabel("nats per token")
    raw = records.column("loss")
    axes.plot(x, raw, color=_BLUE, alpha=0.22, linewidth=0.8)
    smooth = records.smooth("loss")
    axes.plot(x, smooth, color=_BLUE, label="training")
    drawn = [value for value in smooth if math.isfinite(value)]
    if records.validations:
        losses = [event["val_loss"] for event in records.validations]
        axes.plot(
            [axis.of(event) for event in records.validations],
            losses,
            color=_RED,
            marker="o",
            markersize=4.5,
            linewidth=1.2,
            label="validation",
            clip_on=False,
            zorder=3,
        )
        drawn += losses
    if drawn:
        # The first losses of an untrained model would flatten all that follows.
        margin = 0.06 * (max(drawn) - min(drawn)) or 0.1
        axes.set_ylim(min(drawn) - margin, max(drawn) + margin)
    _background(axes, records, axis)
    _legend(axes)


def batch(axes: Axes, records: RunRecords, axis: Axis) -> None:
    axes.set_title("Global batch")
    axes.set_ylabel("samples")
    x = [0.0, *(axis.of(row) for row in records.rows)]
    critical = [records.critical_batch_coefficient * value for value in records.column("noise_scale")]
    batch, micro = records.column("global_batch_size"), records.column("micro_batch_size")
    axes.plot(x[1:], critical, color=_FAINT, linewidth=1.3, label=_critical_label(records))
    # A row stands for the step that ended then: its batch held from the end of the step before.
    axes.step(x, [batch[0], *batch], where="pre", color=INK, linewidth=2, label="global batch")
    axes.step(
        x, [micro[0], *micro], where="pre", color=_GREEN, linewidth=1.2, linestyle="--", label="micro-batch"
    )
    for event in records.failures:
        row = next((row for row in records.rows if row["step"] >= event.get("step", math.inf)), None)
        if row is not None:
            axes.plot(axis.of(row), row["global_batch_size"], "x", color=_RED, markersize=7)
    _powers_of_two(axes, [*batch, *micro])
    _background(axes, records, axis)
    _legend(axes)


def layout(axes: Axes, records: RunRecords, axis: Axis) -> None:
    axes.set_title("Layout")
    edges = [0.0, *(axis.of(row) for row in records.rows)]
    for first, last in records.runs(lambda row: row["layout"]):
        layout = records.rows[first]["layout"]
        height = records.layouts.index(layout)
        axes.barh(
            height,
            edges[last + 1] - edges[first],
            left=edges[first],
            height=0.62,
            color=records.colour(layout),
        )
    axes.set_yticks(range(len(records.layouts)), records.layouts)
    axes.set_ylim(len(records.layouts) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axis.finish(axes)


def noise_scale(axes: Axes, records: RunRecords, axis: Axis) -> None:
    axes.set_title("Noise scale")
    axes.set_ylabel("samples")
    x = [axis.of(row) for row in records.rows]
    noise = records.column("noise_scale")
    batch = records.column("global_batch_size")
    critical = [records.critical_batch_coefficient * value for value in noise]
    axes.plot(x, noise, color=_BLUE, label="noise scale φ")
    axes.plot(x, critical, color=_FAINT, linewidth=1.3, label=_critical_label(records))
    axes.step([0.0, *x], [batch[0], *batch], where="pre", color=INK, linewidth=1.2, label="global batch")
    _powers_of_two(
        axes, [value for value in [*noise, *critical, *batch] if math.isfinite(value) and value > 0]
    )
    if not any(map(math.isfinite, noise)):
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color=_FAINT)
    _background(axes, records, axis)
    _legend(axes)


def throughput(axes: Axes, records: RunRecords, axis: Axis) -> None:
    axes.set_title("Throughput and Goodput")
    axes.set_ylabel("samples per second")
    x = [axis.of(row) for row in records.rows]
    columns = [
        ("samples_per_second", "throughput", _FAINT, "-"),
        ("goodput_realised", "Goodput", _BLUE, "-"),
        ("goodput_predicted", "predicted", _RED, "--"),
    ]
    highest = 0.0
    for name, label, colour, line in columns:
        values = records.smooth(name, restart=configuration)
        highest = max([highest, *(value for value in values if math.isfinite(value))])
        # Cut where the configuration changes: a line across would show rates that never were.
        for first, last in records.runs(configuration):
            part = slice(first, last + 1)
            axes.plot(x[part], values[part], color=colour, linestyle=line, label=label)
            label = "_"
    axes.set_ylim(0, 1.25 * highest or 1)
    _background(axes, records, axis)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Right of the title, where it covers no line."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.01, 0.985),
        ncols=len(axes.get_legend_handles_labels()[1]),
        columnspacing=1.1,
        handlelength=1.5,
        handletextpad=0.5,
    )


def _critical_label(records: RunRecords) -> str:
    return f"critical batch {records.critical_batch_coefficient:g}φ"


def _background(axes: Axes, records: RunRecords, axis: Axis) -> None:
    """The layout as shade and name, and a dotted line at each switch."""
    axis.finish(axes)
    edges = [0.0, *(axis.of(row) for row in records.rows)]
    for first, _ in records.runs(configuration)[1:]:
        axes.axvline(edges[first], color=_FAINT, linewidth=0.7, linestyle=":", zorder=1)
    width = edges[-1] or 1.0
    free_from = 0.0
    for first, last in records.runs(lambda row: row["layout"]):
        layout, left, right = records.rows[first]["layout"], edges[first], edges[last + 1]
        axes.axvspan(left, right, color=records.colour(layout), alpha=0.10, linewidth=0, zorder=0)
        if first:
            axes.axvline(left, color=records.colour(layout), linewidth=1, linestyle=":", zorder=2)
        # A name may run beyond a narrow span, but not into another name.
        if left / width >= free_from and left / width < 0.85:
            axes.annotate(
                layout,
                (left, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -3),
                textcoords="offset points",
                va="top",
                fontsize=7.5,
                color=records.colour(layout, dark=True),
                fontweight="bold",
            )
            free_from = left / width + 0.19


def _powers_of_two(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a tick at each power of two, and room for the layout's name above."""
    low = math.floor(math.log2(min(values, default=1)))
    high = math.ceil(math.log2(max(values, default=2)))
    axes.set_yscale("log", base=2)
    stride = 1 + (high - low) // 9
    axes.set_yticks([2.0**power for power in range(low, high + 1, stride)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(2.0 ** (low - 0.3), 2.0 ** (high + 0.25 * (high - low + 1)))
