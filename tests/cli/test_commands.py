"""The commands as people run them: what they leave behind, and what they refuse before a launch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest
from lightning.fabric import Fabric

from copus_lightning.cli import main
from copus_lightning.cli.fit import first_configuration
from copus_lightning.cli.launch import Place
from copus_lightning.config import ConfigError, RunConfig, default_yaml, load
from copus_lightning.core.layout import Configuration, enumerate_layouts
from copus_lightning.core.profile import Profile
from copus_lightning.core.records import METRICS, read_events

CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 257}
data: {kind: bytes, sequence_length: 32}
schedule: {kind: cosine, warmup_tokens: 500}
run: {accelerator: cpu, devices: 2, max_tokens: 6_000, validate_every_tokens: 2_500, validation_batches: 2,
      loggers: [csv], log_every_steps: 1}
parallel: {global_batch_size: 4, micro_batch_size: 1}
copus: {global_batch_sizes: [4, 8, 16], micro_batch_sizes: [1, 2], decide_every_tokens: 400,
        cooldown_tokens: 400, noise_half_life_samples: 64, threshold: 0.0}
profiling: {accumulations: [1, 2, 4], repeats: 1, warmup_steps: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module", autouse=True)
def running(folder: Path) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """`copus profile` and `copus fit`, from the module's first test on, on ranks of their own.

    The latter as an interpreter of its own, like at a prompt.
    """
    (folder / "run").mkdir()
    (folder / "run" / "metrics.csv").write_text("of an earlier run")
    profile = ["profile", "--config", "tiny.yaml", "--output", "measured/profile.json"]
    fit = [sys.executable, "-m", "copus_lightning.cli", "fit", "--config", "tiny.yaml", "run.run_dir=run"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    commands.forks()  # here, not in the threads
    with ThreadPoolExecutor(2) as executor:
        yield {
            "profile": executor.submit(commands.run, "copus_lightning.cli", *profile, cwd=folder),
            "fit": executor.submit(subprocess.run, fit, cwd=folder, **options),
        }


@pytest.fixture(scope="module")
def profiled(folder: Path, running: dict[str, Future[subprocess.CompletedProcess[str]]]) -> tuple[Path, str]:
    """A measured profile, and what the command printed."""
    done = running["profile"].result()
    assert done.returncode == 0, done.stderr
    return folder / "measured" / "profile.json", done.stdout


@pytest.mark.parametrize("text", ["", "data.sequence_length=64"])
def test_config_prints_what_loads(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [text] if text else []
    assert main(["config", *overrides]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "printed.yaml") == load(None, overrides)
    assert (tmp_path / "printed.yaml").read_text() == default_yaml() or overrides


def test_config_is_instant() -> None:
    code = "import sys; from copus_lightning.cli import main; main(['config'])"
    code += "; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "transformers", "deepspeed", "rich", "matplotlib"} & set(
        done.stderr.split()
    )


def test_profile_measures_every_layout(profiled: tuple[Path, str]) -> None:
    path, printed = profiled
    profile = Profile.load(path)
    points = {(m.layout, m.micro_batch_size, m.accumulation) for m in profile.measurements}
    layouts = enumerate_layouts(2)
    # With one replica and one micro-batch no noise scale could be measured, so no run would be there.
    counts = {layout: (1, 2, 4) if layout.data > 1 else (2, 4) for layout in layouts}
    assert points == {(layout, micro, n) for layout in layouts for micro in (1, 2) for n in counts[layout]}
    assert all(m.peak_memory_bytes for m in profile.measurements) and not profile.infeasible
    assert profile.switch_seconds is not None and profile.switch_seconds > 0
    assert profile.model["sequence_length"] == 32 and profile.hardware["backend"] == "gloo"
    assert profile.table() in printed and "error of a fit" in printed and str(path.name) in printed


def test_fit_measures_trains_and_leaves_a_run_directory(
    folder: Path, running: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    run_dir = folder / "run"
    done = running["fit"].result()
    assert done.returncode == 0, done.stderr
    assert (run_dir / "earlier-1" / "metrics.csv").read_text() == "of an earlier run"
    assert load(run_dir / "config.yaml") == load(folder / "tiny.yaml", ["run.run_dir=run"])
    assert Profile.load(run_dir / "profile.json").world_size == 2

    summary = json.loads((run_dir / "summary.json").read_text())
    wanted = {"final_val_loss", "unigram_entropy", "tokens", "steps", "seconds_total", "seconds_switching"}
    wanted |= {"layout_switches", "batch_changes", "first_configuration", "final_configuration"}
    assert wanted | {"noise_scale_last"} <= set(summary)
    assert summary["ended_by"] == "max_tokens" and 6000 <= summary["tokens"] < 6000 + 16 * 31
    assert summary["first_configuration"]["global_batch_size"] == 4
    assert summary["unigram_entropy"] == pytest.approx(3.24, abs=0.1)
    assert 2 < summary["final_val_loss"] < 5.55  # below the uniform guess
    assert abs(sum(summary["seconds"].values()) - summary["seconds_total"]) < 1e-6

    with (run_dir / "metrics.csv").open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    assert list(rows[0]) == list(METRICS) and len(rows) == summary["steps"]
    assert int(rows[-1]["tokens"]) == summary["tokens"]
    # The schedule counts tokens: half of the warm-up's 500 tokens is a rate of one half.
    early = [row for row in rows if int(row["tokens"]) <= 500]
    for row in early:
        base = float(row["learning_rate"]) / float(row["learning_rate_factor"])
        assert base == pytest.approx(1e-3 * int(row["tokens"]) / 500)
    kinds = [event["kind"] for event in read_events(run_dir)]
    assert kinds[0] == "start" and kinds[-1] == "end" and {"decision", "validation"} <= set(kinds)
    losses = [event["val_loss"] for event in read_events(run_dir, "validation")]
    assert len(losses) >= 3 and losses[-1] == summary["final_val_loss"] < losses[0]
    assert {"overview.png", "loss.png", "csv"} <= {path.name for path in run_dir.iterdir()}
    for text in ("validation loss", "unigram entropy", "layout switches", "dp2-tp1-pp1"):
        assert text in done.stdout
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["fit", "profile"])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.max_tokesn=5"], ["run.max_tokesn: unknown key", "run.max_tokens"]),
        (["optimizer.lr=fast"], ["optimizer.lr: must be a number"]),
        (["parallel.layout=dp4-tp1-pp1"], ["parallel.layout", "4 ranks", "product is 2"]),
        (["parallel.layout=dp1-tp1-pp2", "model.num_hidden_layers=1"], ["parallel.layout", "at most 1"]),
        (
            ["parallel.layout=dp1-tp2-pp1", "model.num_attention_heads=1", "model.num_key_value_heads=1"],
            ["n_heads"],
        ),
        (
            ["parallel.global_batch_size=5", "parallel.micro_batch_size=2"],
            ["parallel.global_batch_size", "4 or 8"],
        ),
        (["data.kind=text", "data.path=no/such/folder"], ["data.path: no/such/folder does not exist"]),
        (["model.model_type=lama"], ["model.model_type: 'lama' is unknown"]),
        (["model.model_type=gpt2"], ["pipeline plan"]),
        (["--learning-rate=3"], ["unknown option --learning-rate=3"]),
    ],
)
def test_bad_input_is_one_line_and_launches_nothing(
    command: str,
    overrides: Sequence[str],
    words: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused(["--config", "tiny.yaml", *overrides], words, command, folder, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.hidden_size=64"],
            ["measured with another model", "hidden_size was 32, is 64", "copus profile"],
        ),
        (["data.sequence_length=16"], ["sequence_length was 32, is 16"]),
        (
            ["copus.micro_batch_sizes=[4]", "parallel.micro_batch_size=4", "parallel.global_batch_size=8"],
            ["measure it with `copus profile`"],
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(
    overrides: Sequence[str],
    words: Sequence[str],
    profiled: tuple[Path, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--config", "tiny.yaml", f"copus.profile={profiled[0]}", *overrides]
    refused(arguments, words, "fit", folder, monkeypatch, capsys)


def test_a_profile_of_another_machine_is_refused(
    profiled: tuple[Path, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(profiled[0].read_text())
    document["hardware"]["device"] = "Abacus"
    (folder / "other.json").write_text(json.dumps(document))
    arguments = ["--config", "tiny.yaml", "copus.profile=other.json"]
    refused(arguments, ["measured with another hardware", "Abacus"], "fit", folder, monkeypatch, capsys)


def refused(
    arguments: Sequence[str],
    words: Sequence[str],
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(*_: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Fabric, "launch", launch)
    capsys.readouterr()
    assert main([command, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1, output
    for word in words:
        assert word in output.err


def test_the_place_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert Place.of(RunConfig()) == Place("cpu", 1, 1)
    assert Place.of(RunConfig(devices=2, num_nodes=3)) == Place("cpu", 2, 3)
    with pytest.raises(
        ConfigError, match=r"^run\.accelerator: gpu is asked for and no GPU is found: use cpu$"
    ):
        Place.of(RunConfig(accelerator="gpu"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert Place.of(RunConfig()) == Place("cuda", 4, 1)
    assert Place.of(RunConfig(accelerator="cpu")) == Place("cpu", 1, 1)
    with pytest.raises(ConfigError, match=r"^run\.devices: 8 GPUs are asked for and 4 found: use at most 4$"):
        Place.of(RunConfig(devices=8))
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    assert Place.of(RunConfig(num_nodes=2)) == Place("cuda", 2, 2)
    with pytest.raises(
        ConfigError, match=r"^run\.devices: .* 4 ranks were launched: set devices=2, num_nodes=2$"
    ):
        Place.of(RunConfig(devices=4, num_nodes=2))


def test_the_first_configuration_is_the_fastest_that_was_measured(
    profiled: tuple[Path, str], folder: Path
) -> None:
    config, place = load(folder / "tiny.yaml"), Place("cpu", 2, 1)
    profile = Profile.load(profiled[0])
    data, pipeline, tensor = enumerate_layouts(2)
    assert first_configuration(config, place, None) == Configuration(data, 4, 1)
    # As seconds per step at four micro-batches; the pipeline is the fastest at two as well.
    seconds = {data: 2.0, pipeline: 1.0, tensor: 4.0}
    profile.measurements = [replace(m, step_seconds=seconds[m.layout]) for m in profile.measurements]
    profile = replace(profile)  # fits anew
    assert first_configuration(config, place, profile) == Configuration(pipeline, 4, 1)
    profile.mark_infeasible(pipeline, 1, "out of memory")
    assert first_configuration(config, place, profile) == Configuration(data, 4, 1)
    fixed = load(folder / "tiny.yaml", ["parallel.layout=dp1-tp2-pp1"])
    assert first_configuration(fixed, place, profile) == Configuration(tensor, 4, 1)
