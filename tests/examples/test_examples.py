"""The examples run as they stand, stay short, and without their marked lines are plain Lightning scripts."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
import torch

from copus_lightning.config import load
from copus_lightning.core.layout import Layout
from copus_lightning.core.profile import Measurement, Profile
from copus_lightning.core.records import read_events, read_metrics
from copus_lightning.engine.fingerprint import hardware_fingerprint

ROOT = Path(__file__).parents[2]
EXAMPLES = {name: ROOT / "examples" / f"{name}_train.py" for name in ("fabric", "trainer")}
MARK = "  # copus"


NOT_SET = dict.fromkeys(("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"))
"""What a launcher sets."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, commands.Command]]:
    """Both examples, running at the same time on two ranks each, with a small model in a folder of its name."""
    folder = tmp_path_factory.mktemp("examples")
    for name in EXAMPLES:
        (folder / name).mkdir()
    small = load_script(EXAMPLES["trainer"].read_text()).LanguageModel(hidden_size=64)
    fast_in_a_pipeline(small.model).save(folder / "trainer" / "profile.json")
    more = {"fabric": [], "trainer": [f"--profile={folder / 'trainer' / 'profile.json'}"]}
    with contextlib.ExitStack() as stack:
        running = {}
        for name, arguments in more.items():
            place = folder / name
            command = commands.Command(
                EXAMPLES[name],
                *["--hidden-size=64", "--max-steps=45", f"--run-dir={place / 'run'}", *arguments],
                cwd=place,
                environment={**NOT_SET, "PYTHONPATH": str(ROOT)},
            )
            running[name] = stack.enter_context(command)
        yield running


def output_of(command: commands.Command) -> str:
    """Standard output of an example that ended well."""
    done = command.done()
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def validation_loss(output: str) -> float:
    found = re.search(r"validation loss (\d+\.\d+) nats", output)
    assert found is not None, output
    return float(found[1])


def fast_in_a_pipeline(model: Any) -> Profile:
    """As if this machine ran ``pp2`` three times as fast as ``dp2``."""
    config = model.config
    sizes = {
        "model_type": "llama",
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_parameters": sum(p.numel() for p in model.parameters()),
    }
    hardware = hardware_fingerprint(torch.device("cpu")) | {"threads_per_rank": 1, "backend": "gloo"}
    points = []
    for layout, seconds in ((Layout(data=2), 0.03), (Layout(pipeline=2), 0.01)):
        points += [Measurement(layout, 1, n, 0.01 + n * seconds) for n in (2, 4, 8)]
    settings = {"precision": "float32", "zero_stage": 1, "sequence_length": 32}
    return Profile(model=sizes | settings, hardware=hardware, world_size=2, measurements=points)


def test_the_fabric_example_as_it_stands(examples: dict[str, commands.Command]) -> None:
    command = examples["fabric"]
    assert validation_loss(output_of(command)) < 5.0, "below log(257)"
    rows = read_metrics(command.cwd / "run")
    assert [row["step"] for row in rows] == list(range(1, 46))
    assert {row["layout"] for row in rows} == {"dp2-tp1-pp1"}
    assert rows[0]["global_batch_size"] == 4
    assert sum(event["kind"] == "decision" for event in read_events(command.cwd / "run")) >= 2


def test_the_trainer_example_with_a_profile(examples: dict[str, commands.Command]) -> None:
    command = examples["trainer"]
    assert validation_loss(output_of(command)) < 5.0, "below log(257)"
    rows = read_metrics(command.cwd / "run")
    assert len(rows) == 45
    assert rows[0]["layout"] == "dp2-tp1-pp1" and rows[-1]["layout"] == "dp1-tp1-pp2"


def load_script(source: str) -> Any:
    module = types.ModuleType("example")
    exec(compile(source, "example", "exec"), vars(module))
    return module


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.filterwarnings("ignore")
def test_without_the_marked_lines_it_is_a_plain_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = EXAMPLES[name].read_text().splitlines()
    assert len(lines) < 100
    plain = "\n".join(line for line in lines if MARK not in line)
    code = plain.split('"""')[2]
    assert "copus" not in code.replace("from copus_lightning.data.corpus import byte_corpus", "")
    monkeypatch.chdir(tmp_path)
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "1")  # to be put back as it was after the test
    monkeypatch.setattr(sys, "argv", ["example", "--devices=1", "--max-steps=2", "--hidden-size=32"])
    load_script(plain).main()
    assert validation_loss(capsys.readouterr().out) > 0


def test_their_model_is_that_of_the_demo_configuration() -> None:
    """So that a profile measured for one serves the other."""
    shape = load(ROOT / "configs" / "demo.yaml", []).model.shape()
    models = [
        load_script(EXAMPLES["fabric"].read_text()).build_model(),
        load_script(EXAMPLES["trainer"].read_text()).LanguageModel().model,
    ]
    for model in models:
        config = model.config
        assert (shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.vocab_size) == (
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.vocab_size,
        )
        assert (shape.hidden_size, shape.intermediate_size) == (config.hidden_size, config.intermediate_size)
