"""What a person sees while a command runs: bars on a terminal, single lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from copus_lightning.config import Config
from copus_lightning.core.layout import Configuration
from copus_lightning.core.records import read_metrics

# Each refresh takes time from the rank that trains.
_REFRESHES_PER_SECOND = 2


@contextlib.contextmanager
def profile_bar(shown: bool) -> Iterator[Callable[[Configuration, int, int], None]]:
    """A bar for `profile_engine`; nothing is shown on ranks other than the first."""
    console = Console()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("profiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
    )
    lines = shown and not console.is_terminal
    task = bar.add_task("", total=None)
    layouts: set[str] = set()

    def progress(configuration: Configuration, done: int, total: int) -> None:
        bar.update(task, completed=done, total=total, description=str(configuration))
        layout = str(configuration.layout)
        if lines and layout not in layouts:
            print(f"profiling {layout} ({done} of {total} steps are done)", flush=True)
        layouts.add(layout)

    with bar:
        yield progress


class RunView:
    """Shows a run: a bar with its present numbers, a line for each switch and each validation.

    Args:
        config: The run.
        shown: False on ranks other than the first, where every method does nothing.
    """

    def __init__(self, config: Config, shown: bool) -> None:
        self.shown = shown
        self.console = Console(highlight=False, soft_wrap=True)
        self._by_tokens = config.run.max_tokens is not None
        total = config.run.max_tokens if self._by_tokens else config.run.max_seconds
        self._bar = Progress(
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)
        self._pace: float | None = None  # tokens per second, averaged

    def __enter__(self) -> RunView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, row: Mapping[str, Any], configuration: Configuration) -> None:
        """After each optimizer step."""
        pace = row["tokens_per_second"]
        changed = row["global_batch_size"] != configuration.global_batch_size
        self._pace = pace if self._pace is None or changed else 0.8 * self._pace + 0.2 * pace
        self._bar.update(
            self._task,
            completed=row["tokens"] if self._by_tokens else row["seconds"],
            description=self._numbers(row, configuration),
        )

    def _numbers(self, row: Mapping[str, Any], configuration: Configuration) -> str:
        noise = row["noise_scale"]
        return (
            f"loss {row['loss']:.3f}  {self._pace or 0:.0f} tokens/s"
            f"  φ {'?' if noise is None else f'{noise:.1f}'}"
            f"  batch {configuration.global_batch_size} of {configuration.micro_batch_size}"
            f"  {configuration.layout}"
        )

    def switched(
        self, row: Mapping[str, Any], before: Configuration, now: Configuration, reason: str
    ) -> None:
        """After a change of configuration."""
        changed = [
            name for name in ("layout", "global_batch_size") if getattr(before, name) != getattr(now, name)
        ]
        what = {"layout": "layout", "global_batch_size": "batch"}[changed[0]] if changed else "micro-batch"
        self._line(row, f"{what}: {before} → {now}: {reason}")

    def validated(self, row: Mapping[str, Any], val_loss: float) -> None:
        """After a validation."""
        if self.shown:
            self._line(row, f"validation loss {val_loss:.3f}  training {row['loss']:.3f}")

    def note(self, row: Mapping[str, Any], text: str) -> None:
        """Anything else worth a line."""
        if self.shown:
            self._line(row, text)

    def _line(self, row: Mapping[str, Any], text: str) -> None:
        # A run that goes on has no row before it has loaded one.
        seconds, tokens = row.get("seconds", 0.0), row.get("tokens", 0)
        self._bar.console.print(f"{seconds:7.1f} s  {tokens:>11,} tokens  {text}", markup=False)

    def summary(self, summary: Mapping[str, Any], run_dir: Path, drawn: Sequence[Path]) -> None:
        """The closing summary."""
        where = Table(
            "configuration", "steps", "tokens", "seconds", "samples/s", title="configurations, in order"
        )
        for column in where.columns[1:]:
            column.justify = "right"
        for name, rows in _visits(read_metrics(run_dir)):
            seconds = sum(row["step_seconds"] for row in rows)
            samples = sum(row["global_batch_size"] for row in rows)
            tokens = sum(row["tokens_per_second"] * row["step_seconds"] for row in rows)
            where.add_row(
                name, f"{len(rows)}", f"{tokens:,.0f}", f"{seconds:.1f}", f"{samples / seconds:.1f}"
            )
        self.console.print(where)
        times = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in summary["seconds"].items() if seconds)
        lines = [
            f"ended by {summary['ended_by']}: {summary['steps']:,} steps, {summary['tokens']:,} tokens,"
            f" {summary['seconds_total']:.1f} s ({times}),"
            f" after {summary['seconds_profiling']:.1f} s of profiling",
            f"{summary['layout_switches']} layout switches and {summary['batch_changes']} batch changes,"
            f" {summary['switch_failures']} failed",
            f"final validation loss {summary['final_val_loss']:.3f} nats per token",
        ]
        entropy = summary["unigram_entropy"]
        if entropy is not None:
            gain = entropy - summary["final_val_loss"]
            where_to = "below" if gain > 0 else "above"
            lines[-1] += f", {abs(gain):.3f} {where_to} the unigram entropy of {entropy:.3f}"
        lines.append(f"records and {len(drawn)} plots in {run_dir}")
        self.console.print("\n".join(lines), markup=False)


def _visits(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Consecutive rows of one layout and global batch, whatever the micro-batch."""
    visits: list[tuple[str, list[Mapping[str, Any]]]] = []
    for row in rows:
        name = f"{row['layout']} batch {row['global_batch_size']}"
        if not visits or visits[-1][0] != name:
            visits.append((name, []))
        visits[-1][1].append(row)
    return visits
