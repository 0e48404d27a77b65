from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.policy import Candidate, Decision
from copus_lightning.core.records import METRICS, RunRecorder, read_events, read_metrics, read_summary

CONFIGURATION = Configuration(Layout(data=2), 8, 2)


def row(step: int, loss: float = 3.0) -> dict:
    return {
        "step": step,
        "tokens": 256 * step,
        "samples": 8 * step,
        "seconds": 0.5 * step,
        "loss": loss,
        **CONFIGURATION.to_dict(),
        "accumulation": 2,
        "noise_scale": None,
    }


def test_rows_come_back_typed(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "runs" / "one")
    recorder.step(row(1, loss=1 / 3))
    recorder.step({**row(2), "loss": math.nan, "noise_scale": 12.5})
    first, second = read_metrics(tmp_path / "runs" / "one")
    assert list(first) == list(METRICS)
    assert first["loss"] == 1 / 3, "to the last bit"
    assert (first["step"], first["tokens"], first["layout"]) == (1, 256, "dp2-tp1-pp1")
    assert isinstance(first["tokens"], int)
    assert first["noise_scale"] is None and first["grad_norm"] is None
    assert math.isnan(second["loss"]) and second["noise_scale"] == 12.5


def test_every_row_is_on_disk_at_once_and_nothing_stays_open(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step in range(1, 4):
        recorder.step(row(step))
        recorder.event("validation", step=step, val_loss=2.0)
        with (tmp_path / "metrics.csv").open() as lines:
            assert len(list(csv.DictReader(lines))) == step
        assert len(read_events(tmp_path)) == step
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        open_files = {str(entry.resolve()) for entry in descriptors.iterdir()}
        assert not any(str(tmp_path) in name for name in open_files)


def test_a_resumed_run_appends_and_reading_leaves_out_what_it_undid(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step in range(1, 6):
        recorder.step(row(step, loss=5.0))
    resumed = RunRecorder(tmp_path)  # from a checkpoint of step 3
    for step in range(4, 8):
        resumed.step(row(step, loss=4.0))
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["loss"] for r in rows] == [5.0] * 3 + [4.0] * 4
    assert [r["step"] for r in read_metrics(tmp_path, every_row=True)] == [1, 2, 3, 4, 5, 4, 5, 6, 7]


def test_a_torn_last_line_harms_neither_readers_nor_the_next_row(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.step(row(1))
    recorder.event("decision", step=1)
    for name, torn in (("metrics.csv", b"2,512,16,1."), ("events.jsonl", b'{"kind": "dec\xc3')):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    assert [e["step"] for e in read_events(tmp_path)] == [1]
    recorder = RunRecorder(tmp_path)
    recorder.step(row(2))
    recorder.event("decision", step=2)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    assert [e["step"] for e in read_events(tmp_path)] == [1, 2]


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.step(row(1))
    full = tmp_path / "metrics.csv"
    kept = full.rename(tmp_path / "kept.csv")
    full.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=r"metrics\.csv lacks lines .*No space left on device"):
        recorder.step(row(2))
    full.unlink()
    kept.rename(full)
    recorder.step(row(3))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 3]


def test_a_directory_torn_before_its_first_row_is_usable(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,tok")
    RunRecorder(tmp_path).step(row(1))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_unknown_columns_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column speed"):
        RunRecorder(tmp_path / "a").step({**row(1), "speed": 1.0})
    (tmp_path / "metrics.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"other columns .*choose another run directory") as error:
        RunRecorder(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot be made"):
        RunRecorder(tmp_path / "metrics.csv" / "run")


def test_unreadable_lines_are_named(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.step(row(1))
    for line in ("not,a,row\n", "x" + "," * (len(METRICS) - 1) + "\n"):
        text = (tmp_path / "metrics.csv").read_text()
        (tmp_path / "metrics.csv").write_text(text + line)
        with pytest.raises(ValueError, match=r"metrics.csv: line 3"):
            read_metrics(tmp_path)
        (tmp_path / "metrics.csv").write_text(text)
    (tmp_path / "events.jsonl").write_text('{"kind": "a"}\nnonsense\n')
    with pytest.raises(ValueError, match=r"events.jsonl: line 2"):
        read_events(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the directory of a run"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match=r"summary.json"):
        read_summary(tmp_path)
    assert read_events(tmp_path) == []
    RunRecorder(tmp_path)
    assert read_metrics(tmp_path) == []


class Scalar:
    """Stands for a zero-dimensional array."""

    def item(self) -> float:
        return 2.5


def test_events_hold_what_the_parts_can_write(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    decision = Decision(CONFIGURATION, "better", (Candidate(CONFIGURATION, 12.0, math.inf),))
    recorder.event("decision", step=3, **decision.to_dict())
    recorder.event(
        "switch",
        **{"from": CONFIGURATION, "to": Configuration(Layout(pipeline=2), 8, 2)},
        seconds={"stage": 0.1, "exchange": Scalar()},
        layout=Layout(data=2),
        peers=(0, 1),
        note="first\nsecond\u2028third",
    )
    first, second = read_events(tmp_path)
    assert first["configuration"] == CONFIGURATION.to_dict()
    assert first["candidates"][0]["goodput"] is None, "JSON has no infinity"
    assert second["from"] == CONFIGURATION.to_dict()
    assert second["seconds"] == {"stage": 0.1, "exchange": 2.5}
    assert (second["layout"], second["peers"]) == ("dp2-tp1-pp1", [0, 1])
    assert second["note"] == "first\nsecond\u2028third"
    assert [event["kind"] for event in read_events(tmp_path, kind="switch")] == ["switch"]
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        json.loads(line)
    recorder.step({**row(1), "loss": Scalar()})
    assert read_metrics(tmp_path)[0]["loss"] == 2.5


def test_summary_is_replaced_whole(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.summary({"final_val_loss": 2.0, "final_configuration": CONFIGURATION})
    recorder.summary({"final_val_loss": math.nan, "final_configuration": CONFIGURATION})
    assert read_summary(tmp_path) == {
        "final_val_loss": None,
        "final_configuration": CONFIGURATION.to_dict(),
    }
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.csv", "summary.json"]
