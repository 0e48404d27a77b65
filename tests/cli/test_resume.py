"""`copus fit` that is pre-empted or loses a rank and goes on, and `copus export` of what it left."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from copus_lightning.cli import main
from copus_lightning.core.records import read_events, read_metrics
from copus_lightning.engine.checkpoint_format import Manifest, newest

CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 257}
data: {kind: bytes, sequence_length: 32}
schedule: {kind: constant, warmup_tokens: 500}
run: {run_dir: run, accelerator: cpu, devices: 2, max_tokens: 100_000_000, validation_batches: 1, loggers: [],
      checkpoint_every_tokens: 600, resume: auto}
parallel: {layout: dp1-tp1-pp2, global_batch_size: 4}
copus: {policy: ramp, ramp: "0:4 1500:8", global_batch_sizes: [4, 8], decide_every_tokens: 100}
"""

LOST = """
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 257}
data: {kind: bytes, sequence_length: 32}
schedule: {kind: constant, warmup_tokens: 500}
run: {accelerator: cpu, devices: 2, max_tokens: 12_400, validation_batches: 1, loggers: [],
      checkpoint_every_tokens: 2480, resume: auto}
parallel: {layout: dp2-tp1-pp1, global_batch_size: 4, timeout_seconds: 30}
copus: {policy: static}
"""
"""100 steps of 4 samples, with a checkpoint after every 20."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that got SIGTERM after 20 steps, on its first rank alone."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "tiny.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "copus_lightning.cli", "fit", "--config", "tiny.yaml"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while not (folder / "run/metrics.csv").exists() or len(read_metrics(folder / "run")) < 20:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "pre-empted: go on with run.resume=auto" in printed
    return folder


def test_a_run_that_is_pre_empted_saves_and_goes_on_where_it_was(folder: Path) -> None:
    rows = read_metrics(folder / "run")
    checkpoints = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
    assert len(checkpoints) == 2 and checkpoints[-1] == f"step-{rows[-1]['step']:08d}", (
        "the last two are kept"
    )
    assert json.loads((folder / "run/summary.json").read_text())["ended_by"] == "preemption"
    before = rows[-1]

    overrides = [f"run.max_tokens={before['tokens'] + 2000}", "parallel.layout=dp2-tp1-pp1"]
    done = subprocess.run(
        [sys.executable, "-m", "copus_lightning.cli", "fit", "--config", "tiny.yaml", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"goes on from run/checkpoints/{checkpoints[-1]} in" in done.stdout
    every_row = read_metrics(folder / "run", every_row=True)
    assert [row["step"] for row in every_row] == list(range(1, len(every_row) + 1)), "no step was made twice"
    later = every_row[len(rows) :]
    assert {row["layout"] for row in rows} == {"dp1-tp1-pp2"}
    assert {row["layout"] for row in later} == {"dp2-tp1-pp1"}
    assert later[0]["global_batch_size"] == before["global_batch_size"] == 8, "the ramp goes on where it was"
    assert later[0]["samples"] == before["samples"] + 8 and later[0]["tokens"] == before["tokens"] + 8 * 31
    assert later[0]["seconds"] > before["seconds"]
    assert later[0]["loss"] == pytest.approx(before["loss"], abs=0.7)
    kinds = [event["kind"] for event in read_events(folder / "run")]
    assert kinds.count("resumed") == 1 and kinds.count("end") == 2
    last = newest(folder / "run/checkpoints")
    assert last is not None and last.name == f"step-{every_row[-1]['step']:08d}", "the end is saved too"
    assert not list((folder / "run").glob("earlier-*"))


def test_export_writes_a_hugging_face_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(newest(folder / "run/checkpoints"))
    assert main(["export", checkpoint, str(folder / "exported"), "--dtype", "bfloat16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    config = json.loads((folder / "exported/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    for arguments, words in [
        ([checkpoint, str(folder / "exported")], "is not an empty folder"),
        ([str(folder / "run"), str(folder / "new")], "has no copus.json"),
        ([checkpoint, str(folder / "new"), "--dtype", "int8"], "dtype='int8' is not known"),
        ([checkpoint, str(folder / "new"), "surplus"], "unexpected word surplus"),
        ([checkpoint], "the following arguments are required: OUT"),
    ]:
        assert main(["export", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_launched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    checkpoint = newest("run/checkpoints")
    assert checkpoint is not None
    broken = folder / "broken"
    shutil.copytree(checkpoint, broken, dirs_exist_ok=True)
    content = json.loads((broken / "copus.json").read_text())
    (broken / "copus.json").write_text(json.dumps({**content, "format": "other"}))
    for overrides, words in [
        (["model.hidden_size=64"], "is of another model, its hidden_size is 32 and not 64"),
        ([f"run.resume={broken}"], "run.resume: "),
        ([f"run.resume={folder}"], "has no copus.json"),
    ]:
        assert main(["fit", "--config", "tiny.yaml", *overrides]) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
    assert Manifest.read(checkpoint).training["world_size"] == 2


def test_a_run_that_loses_a_rank_says_so_and_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(LOST)
    command = [sys.executable, "-m", "copus_lightning.cli", "fit", "--config", "tiny.yaml"]

    def to_its_end(run_dir: str) -> str:
        done = subprocess.run(
            [*command, f"run.run_dir={run_dir}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    process = subprocess.Popen(
        [*command, "run.run_dir=run"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while (saved := newest(tmp_path / "run/checkpoints")) is None or len(
            read_metrics(tmp_path / "run")
        ) < int(saved.name.removeprefix("step-")) + 10:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        (second,) = [child for child in children if child.environ().get("LOCAL_RANK") == "1"]
        second.kill()
        lost_at = time.monotonic()
        _, errors = process.communicate(timeout=60)
        ending_seconds = time.monotonic() - lost_at
    finally:
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    assert process.returncode == 1 and ending_seconds < 30, (process.returncode, ending_seconds)
    (line,) = errors.splitlines()
    assert line.startswith("copus: rank 1 stopped answering") and "run.resume=auto" in line
    assert len(read_metrics(tmp_path / "run")) < 100, "it was lost in the middle"
    saved = newest(tmp_path / "run/checkpoints")

    assert saved is not None and f"goes on from run/checkpoints/{saved.name} in" in to_its_end("run")
    to_its_end("uninterrupted")
    rows, expected = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "uninterrupted")
    assert len(read_metrics(tmp_path / "run", every_row=True)) > 100, "some steps were made again"
    for found in (rows, expected):
        assert [row["step"] for row in found] == list(range(1, 101))
        assert [row["samples"] for row in found] == list(range(4, 401, 4))
    losses = [row["loss"] for row in expected]
    moves = [abs(a - b) for a, b in itertools.pairwise(losses)]
    assert statistics.median(moves) > 1e-2, "other samples would show"
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-4)
