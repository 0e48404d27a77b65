"""What a run leaves on disk, and how it is read back.

| file           | holds                                                                                  |
|----------------|----------------------------------------------------------------------------------------|
| `metrics.csv`  | one row per optimizer step, the columns of `METRICS`                                   |
| `events.jsonl` | one JSON object per line: `kind` and the fields of a decision, switch, validation, ... |
| `summary.json` | the run in a few numbers, replaced whole                                               |

Only one process writes. Every row reaches the operating system before `step` returns, so a killed process
loses none; a line that a crash of the machine cut short is dropped when the run goes on or is read.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS: dict[str, str] = {
    "step": "optimizer steps made",
    "tokens": "target tokens trained on",
    "samples": "samples trained on",
    "seconds": "wall time of the run, s",
    "step_seconds": "wall time of this step, s",
    "loss": "mean over the target tokens of the global batch, nats",
    "val_loss": "validation loss taken after this step, if one was, nats",
    "layout": "data, tensor and pipeline sizes",
    "global_batch_size": "samples per optimizer step",
    "micro_batch_size": "samples per forward and backward of a data rank",
    "accumulation": "micro-batches per optimizer step and data rank",
    "noise_scale": "phi = noise_trace / noise_sq_norm, samples; empty while not known",
    "noise_trace": "tr(Sigma) per sample, smoothed",
    "noise_sq_norm": "|G|^2, smoothed",
    "grad_norm": "global gradient norm before clipping",
    "goodput_predicted": "useful samples/s from the corrected profile",
    "goodput_realised": "useful samples/s from this step's time",
    "samples_per_second": "samples consumed over wall time",
    "tokens_per_second": "target tokens over wall time",
    "learning_rate": "of the first parameter group, in this step",
    "learning_rate_factor": "factor of the batch on the user's rate, in this step",
}

_COUNTS = {"step", "tokens", "samples", "global_batch_size", "micro_batch_size", "accumulation"}
_TEXTS = {"layout"}

METRICS_FILE, EVENTS_FILE, SUMMARY_FILE = "metrics.csv", "events.jsonl", "summary.json"


class RunRecorder:
    """Writes a run directory, and goes on where an earlier run stopped.

    Files are opened for each line: nothing stays open over a switch, and nothing waits in a buffer.

    Args:
        directory: Made if missing.

    Raises:
        ValueError: If the directory holds a metrics.csv with other columns, or cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run directory {self.directory} cannot be made ({error.strerror})") from None
        self._metrics = self.directory / METRICS_FILE
        self._events = self.directory / EVENTS_FILE
        for path in (self._metrics, self._events):
            _drop_torn_line(path)
        header = ",".join(METRICS)
        if not self._metrics.exists() or self._metrics.stat().st_size == 0:
            self._metrics.write_text(header + "\n", encoding="utf-8")
            return
        with self._metrics.open(encoding="utf-8") as lines:
            found = lines.readline().rstrip("\n")
        if found != header:
            raise ValueError(
                f"{self._metrics} has other columns than this version writes: choose another run directory"
            )

    def step(self, row: Mapping[str, Any]) -> None:
        """Append a row; a column that is left out or None stays empty.

        Raises:
            ValueError: If there is a column that `METRICS` does not list.
        """
        unknown = [key for key in row if key not in METRICS]
        if unknown:
            raise ValueError(f"metrics.csv has no column {', '.join(unknown)}: list it in records.METRICS")
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(_number(row.get(key)) for key in METRICS)
        _append(self._metrics, line.getvalue())

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event. A value with a `to_dict` is written by it; a number that is not finite is null.

        Unlike rows, events that a resume undid stay when they are read: they did happen.
        """
        _append(self._events, json.dumps(_plain({"kind": kind, **fields}), allow_nan=False) + "\n")

    def summary(self, fields: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all. Numbers that are not finite become null."""
        partial = self.directory / f".{SUMMARY_FILE}.partial"
        text = json.dumps(_plain(dict(fields)), indent=2, allow_nan=False) + "\n"
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.directory / SUMMARY_FILE)
        except OSError as error:
            warnings.warn(f"{SUMMARY_FILE} could not be written ({error.strerror}): {text}", stacklevel=2)


def read_metrics(directory: str | os.PathLike[str], every_row: bool = False) -> list[dict[str, Any]]:
    """The rows of metrics.csv: counts as int, layout as str, the rest as float, empty as None.

    A run that resumes from a checkpoint makes some steps again. The file keeps both; here the steps that the
    resume undid are left out, so that steps, tokens and samples rise throughout, unless `every_row` is set.

    Raises:
        ValueError: If there is no metrics.csv, or a line cannot be read.
    """
    path = Path(directory) / METRICS_FILE
    rows: list[dict[str, Any]] = []
    reader = csv.DictReader(io.StringIO(_whole_lines(path)))
    for row in reader:
        try:
            typed = {key: _typed(key, value) for key, value in row.items()}
        except (TypeError, ValueError):
            raise ValueError(f"{path}: line {reader.line_num} cannot be read: remove it") from None
        if not every_row:
            while rows and rows[-1]["step"] >= typed["step"]:
                rows.pop()
        rows.append(typed)
    return rows


def read_events(directory: str | os.PathLike[str], kind: str | None = None) -> list[dict[str, Any]]:
    """The events of events.jsonl in order, or only those of a kind; none if there is no file.

    Raises:
        ValueError: If a line cannot be read.
    """
    path = Path(directory) / EVENTS_FILE
    if not path.exists():
        return []
    events = []
    for number, line in enumerate(_whole_lines(path).splitlines(), start=1):
        try:
            event = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}: line {number} cannot be read: remove it") from None
        if kind is None or event["kind"] == kind:
            events.append(event)
    return events


def read_summary(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of summary.json.

    Raises:
        ValueError: If there is none.
    """
    path = Path(directory) / SUMMARY_FILE
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file: the run has not ended yet, or it is another directory"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _append(path: Path, text: str) -> None:
    # One write of whole lines, so that a reader or a kill finds no half of one.
    data = text.encode("utf-8")
    try:
        with path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        # A run is worth more than its records.
        warnings.warn(f"{path} lacks lines that could not be written ({error.strerror})", stacklevel=3)


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def _whole_lines(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: give the directory of a run")
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1].decode("utf-8")


def _typed(key: str, value: str) -> Any:
    if value == "":
        return None
    if key in _COUNTS:
        return int(value)
    return value if key in _TEXTS else float(value)


def _number(value: Any) -> Any:
    # A scalar of an array library, written as the number that it is.
    return value.item() if hasattr(value, "item") else value


def _plain(value: Any) -> Any:
    value = _number(value)
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)  # a layout, a path
