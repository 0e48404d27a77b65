"""Figures of synthetic runs, recorded as a run records itself."""

from __future__ import annotations

import math
import random
from pathlib import Path

import matplotlib
import matplotlib.image
import pytest

from copus_lightning.core.goodput import goodput
from copus_lightning.core.records import RunRecorder
from copus_lightning.plots import draw_run
from copus_lightning.plots.series import RunRecords

NAMES = ["overview.png", "loss.png", "configuration.png", "noise_scale.png", "throughput.png"]


def record_run(directory: Path, n_steps: int = 400, stages: list[tuple[str, int, int]] | None = None) -> None:
    """A run of 128-token samples whose batch and layout change at equal shares of its steps."""
    if stages is None:
        stages = [
            ("dp1-tp1-pp2", 4, 1),
            ("dp1-tp1-pp2", 8, 2),
            ("dp1-tp1-pp2", 16, 2),
            ("dp2-tp1-pp1", 32, 4),
            ("dp2-tp1-pp1", 64, 8),
        ]
    generator = random.Random(0)
    recorder = RunRecorder(directory)
    tokens, samples, seconds = 0, 0, 0.0
    for step in range(1, n_steps + 1):
        layout, batch, micro = stages[(step - 1) * len(stages) // n_steps]
        if step > 1 and layout != stages[(step - 2) * len(stages) // n_steps][0]:
            seconds += 0.8
            recorder.event("switch", step=step - 1, layout_changed=True)
        rate = 16 * batch / (batch + 3)
        step_seconds = batch / rate * generator.uniform(0.85, 1.3)
        tokens, samples, seconds = tokens + 127 * batch, samples + batch, seconds + step_seconds
        loss = 1.9 + 3.6 * math.exp(-tokens / 120_000) + generator.gauss(0, 0.5 / math.sqrt(batch))
        noise_scale = 2 + 14 * (1 - math.exp(-tokens / 400_000)) if step > 8 else None
        rates = {}
        if noise_scale is not None:
            rates["goodput_predicted"] = goodput(rate, batch, noise_scale)
            rates["goodput_realised"] = goodput(batch / step_seconds, batch, noise_scale)
        recorder.step(
            {
                "step": step,
                "tokens": tokens,
                "samples": samples,
                "seconds": seconds,
                "step_seconds": step_seconds,
                "loss": loss,
                "layout": layout,
                "global_batch_size": batch,
                "micro_batch_size": micro,
                "noise_scale": noise_scale,
                "samples_per_second": batch / step_seconds,
                **rates,
            }
        )
        if step % (n_steps // 8 or 1) == 0:
            val_loss = 1.95 + 3.6 * math.exp(-tokens / 120_000)
            recorder.event("validation", step=step, tokens=tokens, seconds=seconds, val_loss=val_loss)
    recorder.event("switch_failed", step=n_steps // 2, reason="out of memory")


def test_a_run_is_drawn_whole(tmp_path: Path) -> None:
    record_run(tmp_path)
    settings = dict(matplotlib.rcParams)
    paths = draw_run(tmp_path)
    assert [path.name for path in paths] == NAMES
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image.shape[0] >= 500 and image.shape[1] >= 1000
        assert image[..., :3].std() > 0.02  # not blank
    assert dict(matplotlib.rcParams) == settings


@pytest.mark.parametrize(
    ("n_steps", "stages"),
    [
        (1, [("dp1-tp1-pp1", 1, 1)]),
        (3, [("dp2-tp1-pp1", 4, 1)]),
        (5, [("dp2-tp1-pp1", 4, 1), ("dp1-tp2-pp1", 8, 1), ("dp1-tp1-pp2", 4, 4)]),
        (60, [(f"dp{n}-tp1-pp1", n, 1) for n in range(1, 13)]),
    ],
    ids=["one step", "no noise scale", "three layouts", "more layouts than colours"],
)
def test_short_and_odd_runs_are_drawn(
    tmp_path: Path, n_steps: int, stages: list[tuple[str, int, int]]
) -> None:
    record_run(tmp_path, n_steps, stages)
    assert [path.name for path in draw_run(tmp_path, critical_batch_coefficient=1.0)] == NAMES


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    RunRecorder(tmp_path)
    assert draw_run(tmp_path) == []
    with pytest.raises(ValueError, match=r"metrics\.csv"):
        draw_run(tmp_path / "nowhere")


def test_empty_and_infinite_losses_leave_gaps(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step, loss in enumerate([None, 3.0, math.inf, 2.0, math.nan], start=1):
        recorder.step(
            {
                "step": step,
                "tokens": 100 * step,
                "seconds": 1.0 * step,
                "loss": loss,
                "layout": "dp1-tp1-pp1",
                "global_batch_size": 2,
                "micro_batch_size": 1,
            }
        )
    recorder.event("validation", step=3, tokens=300, seconds=3.0, val_loss=math.nan)
    assert len(draw_run(tmp_path)) == len(NAMES)


def rows(*steps: tuple[int, float, int]) -> RunRecords:
    """Records of `(tokens, loss, batch)`."""
    table = [
        {"tokens": tokens, "loss": loss, "global_batch_size": batch, "layout": f"dp{batch}-tp1-pp1"}
        for tokens, loss, batch in steps
    ]
    return RunRecords("run", table, [], [], 2.0)


def test_smoothing_counts_tokens() -> None:
    constant = rows(*((100 * step, 3.0, 1) for step in range(1, 50)))
    assert constant.smooth("loss") == pytest.approx([3.0] * 49)
    # One long step weighs as much as the ten short ones that it replaces.
    short = rows(*((10 * step, float(step > 90), 1) for step in range(1, 101)))
    long = rows(*((10 * step, float(step > 90), 1) for step in [*range(1, 91), 100]))
    assert short.smooth("loss")[-1] == pytest.approx(long.smooth("loss")[-1], rel=0.02)


def test_smoothing_restarts_with_the_configuration() -> None:
    records = rows(*((10 * step, 1.0 if step <= 5 else 9.0, 1 if step <= 5 else 2) for step in range(1, 11)))
    smoothed = records.smooth("loss", restart=lambda row: row["global_batch_size"])
    assert smoothed == pytest.approx([1.0] * 5 + [9.0] * 5)
    assert records.runs(lambda row: row["layout"]) == [(0, 4), (5, 9)]
    assert records.colour("dp1-tp1-pp1") != records.colour("dp2-tp1-pp1")
