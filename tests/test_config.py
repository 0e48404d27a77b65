"""The YAML schema: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from copus_lightning.config import Config, ConfigError, ModelConfig, default_yaml, load, render
from copus_lightning.core.layout import Layout

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(4096))
    return path


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


# -- what ships ------------------------------------------------------------------------------------------


def test_every_shipped_config_loads(tokens_file: Path) -> None:
    for path in CONFIGS.glob("*.yaml"):
        overrides = [f"data.path={tokens_file}"] if "data.path=" in path.read_text() else []
        config = load(path, overrides)
        assert config.run.world_size is not None
        assert config.first_configuration(config.run.world_size).layout.world_size == config.run.world_size


def test_the_demo_is_small_and_the_cluster_config_is_the_real_model(tokens_file: Path) -> None:
    demo = load(CONFIGS / "demo.yaml")
    assert demo.run.world_size == 2 and demo.data.kind == "bytes"
    assert {4, 64} <= set(demo.copus.global_batch_sizes)
    cluster = load(CONFIGS / "llama3.2-3b_8xh100.yaml", [f"data.path={tokens_file}"])
    assert cluster.run.max_tokens == 20_000_000_000
    shape = cluster.model.shape()
    layer = 2 * 3072**2 + 2 * 3072 * 1024 + 3 * 3072 * 8192 + 2 * 3072
    n_parameters = 128256 * shape.hidden_size + shape.n_layers * layer + 3072
    assert n_parameters == 3_212_749_824


def test_a_required_value_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.path: a value is required here: give it as data\.path=\.\.\.$"
    ):
        load(CONFIGS / "llama3.2-3b_8xh100.yaml")


# -- the printed defaults --------------------------------------------------------------------------------


def test_the_default_yaml_loads_as_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, default_yaml())) == Config() == load()


def test_the_default_yaml_comments_every_key() -> None:
    text = default_yaml()
    for section in fields(Config):
        for entry in fields(getattr(Config(), section.name)):
            assert f"  {entry.name}: " in text
            assert entry.metadata["comment"].split()[0] in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_rendered_configs_load_to_the_same_values(tmp_path: Path) -> None:
    generator = random.Random(0)
    for _ in range(20):
        config = load(
            None,
            [
                f"optimizer.lr={10 ** generator.uniform(-9, 1)!r}",
                f"run.max_tokens={generator.randrange(10**6, 10**13)}",
                f"run.run_dir={json.dumps(generator.choice(['runs/on', 'off', '1e3', 'a b #c', '32-true']))}",
                f"run.devices={generator.choice(['auto', 1])}",
                f"run.target_loss={generator.choice(['null', '2.5'])}",
                "model.extra={head_dim: 64, rope_scaling: {rope_type: linear, factor: 1e-05}}",
                f"run.loggers={generator.choice(['[]', '[csv]'])}",
            ],
        )
        assert load(write(tmp_path, render(config))) == config


# -- numbers and text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["500000000", "5e8", "5.0e8", "500_000_000", '"5e8"', '"500_000_000"', "0.5e9"]
)
def test_whole_numbers_in_every_form(tmp_path: Path, text: str) -> None:
    from_file = load(write(tmp_path, f"run:\n  max_tokens: {text}\n"))
    assert from_file.run.max_tokens == 500_000_000 and isinstance(from_file.run.max_tokens, int)
    assert load(None, [f"run.max_tokens={text}"]) == from_file


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", '"1e-3"', "1E-3", ".001"])
def test_numbers_in_every_form(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, f"optimizer:\n  lr: {text}\n")).optimizer.lr == 1e-3
    assert load(None, [f"optimizer.lr={text}"]).optimizer.lr == 1e-3


def test_a_whole_number_is_a_number_and_large_ones_stay_exact(tmp_path: Path) -> None:
    config = load(None, ["run.max_seconds=60", "run.max_tokens=9007199254740993", "optimizer.betas=[0, 0.5]"])
    assert config.run.max_seconds == 60.0 and isinstance(config.run.max_seconds, float)
    assert config.run.max_tokens == 9007199254740993
    assert config.optimizer.betas == [0.0, 0.5]


def test_later_overrides_win_over_earlier_ones_and_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "run:\n  seed: 1\n  max_tokens: 1e6\ndata:\n")
    config = load(path, ["run.seed=2", "run.seed=3", "copus.ramp=0:4 1M:8", "copus.policy=ramp"])
    assert (config.run.seed, config.run.max_tokens, config.copus.ramp) == (3, 1_000_000, "0:4 1M:8")


def test_interpolations_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "seven")
    text = "model:\n  max_position_embeddings: ${data.sequence_length}\n"
    config = load(write(tmp_path, text), ["run.run_dir=runs/${oc.env:RUN_NAME}"])
    assert config.model.max_position_embeddings == config.data.sequence_length == 128
    assert config.run.run_dir == "runs/seven"


# -- refusals: one line, the key, the fix ----------------------------------------------------------------


REFUSALS = [
    # unknown keys
    (["optimizer.learning_rate=1"], r"optimizer\.learning_rate: unknown key"),
    (
        ["optimizer.weight_decy=1"],
        r"optimizer\.weight_decy: unknown key, did you mean optimizer\.weight_decay\?",
    ),
    (["run.sequence_length=4"], r"run\.sequence_length: unknown key, did you mean data\.sequence_length\?"),
    (["modle.hidden_size=4"], r"modle: unknown key, did you mean model\?"),
    (
        ["model.qk_norm=true"],
        r"model\.qk_norm: unknown key: any other Hugging Face field belongs below model\.extra",
    ),
    (["nonsense.thing=4"], r"nonsense: unknown key: the sections are copus, data, model"),
    # overrides
    (["lr=1"], r"override 'lr=1' is not understood: write it like"),
    (["optimizer.lr"], r"override 'optimizer\.lr' is not understood"),
    (["--optimizer.lr=1"], r"override '--optimizer\.lr=1' is not understood"),
    (["optimizer.betas=[1"], r"override 'optimizer\.betas=\[1'.* is not valid YAML"),
    # types
    (["run.max_tokens=1.5"], r"run\.max_tokens: must be a whole number or null, got 1\.5"),
    (["run.max_tokens=many"], r"run\.max_tokens: must be a whole number or null, got 'many'"),
    (["run.seed=null"], r"run\.seed: must be a whole number, got None"),
    (["run.seed=true"], r"run\.seed: must be a whole number, got True"),
    (["optimizer.lr=fast"], r"optimizer\.lr: must be a number, got 'fast'"),
    (["optimizer.lr=.nan"], r"optimizer\.lr: nan is not a finite number"),
    (["model.tie_word_embeddings=1"], r"model\.tie_word_embeddings: must be true or false, got 1"),
    (["copus.ramp=48"], r"copus\.ramp: must be text or null, got 48: put it in quotes"),
    (
        ["copus.global_batch_sizes=8"],
        r"copus\.global_batch_sizes: must be a list, got 8: write it like \[8\]",
    ),
    (["copus.global_batch_sizes=[8, x]"], r"copus\.global_batch_sizes\[1\]: must be a whole number, got 'x'"),
    (["copus.global_batch_sizes=[]"], r"copus\.global_batch_sizes: the list is empty"),
    (["model.extra=3"], r"model\.extra: must hold keys with values"),
    # bounds and choices
    (["optimizer.lr=0"], r"optimizer\.lr: must be above 0, got 0"),
    (["data.validation_fraction=1"], r"data\.validation_fraction: must be below 1, got 1"),
    (["schedule.min_ratio=1.1"], r"schedule\.min_ratio: must be at most 1, got 1\.1"),
    (["copus.micro_batch_sizes=[0]"], r"copus\.micro_batch_sizes: must be at least 1, got 0"),
    (["optimizer.name=adamW"], r"optimizer\.name: 'adamW' is not a choice, did you mean adamw\?"),
    (["run.precision=32"], r"run\.precision: must be text, got 32: put it in quotes"),
    (["run.precision=fp8"], r"run\.precision: 'fp8' is not a choice: use 32-true \| bf16-mixed \| bf16-true"),
    (["parallel.zero_stage=3"], r"parallel\.zero_stage: 3 is not a choice: use 0 \| 1"),
    (["run.devices=all"], r"run\.devices: 'all' is neither a number of ranks per node nor auto"),
    (["run.devices=0"], r"run\.devices: must be at least 1, got 0"),
    (["run.loggers=[csv, wanb]"], r"run\.loggers: 'wanb' is not a choice, did you mean wandb\?"),
    # model and data
    (["model.hidden_size=255"], r"model\.hidden_size: 255 does not divide by num_attention_heads=4"),
    (
        ["model.num_key_value_heads=3"],
        r"model\.num_key_value_heads: 3 does not divide .*: use one of 1, 2, 4",
    ),
    (["model.extra.hidden_size=4"], r"model\.extra\.hidden_size: .* set model\.hidden_size"),
    (["model.vocab_size=256"], r"model\.vocab_size: 256 is too small for data\.kind=bytes: use 257"),
    (
        ["data.sequence_length=2048"],
        r"data\.sequence_length: 2048 is longer than model\.max_position_embeddings=1024",
    ),
    (["data.path=x"], r"data\.path: data\.kind=bytes does not read x: set data\.kind=text"),
    (["data.kind=text"], r"data\.path: data\.kind=text needs one"),
    (
        ["data.kind=text", "data.path=no/such"],
        r"data\.path: no/such does not exist: give an existing file or folder",
    ),
    (["data.kind=tokens", "data.path=."], r"data\.path: \. is not a \.bin or \.npy file"),
    (["data.tokenizer=x"], r"data\.tokenizer: data\.kind=bytes does not read it"),
    # optimizer and schedule
    (["optimizer.momentum=0.9"], r"optimizer\.momentum: adamw has none"),
    (["optimizer.betas=[0.9]"], r"optimizer\.betas: adamw has two, got 1"),
    (["schedule.kind=wsd"], r"schedule\.decay_tokens: schedule\.kind=wsd needs the length of its decay"),
    (["schedule.decay_tokens=10"], r"schedule\.decay_tokens: schedule\.kind=cosine does not read it"),
    (
        ["schedule.warmup_tokens=2e6"],
        r"schedule\.warmup_tokens: 2000000 do not fit into the schedule's 2000000",
    ),
    (
        ["run.max_tokens=null", "run.max_seconds=9"],
        r"schedule\.total_tokens: schedule\.kind=cosine has to end",
    ),
    # run
    (["run.max_tokens=null"], r"schedule\.total_tokens: "),
    (["run.max_tokens=null", "schedule.kind=constant"], r"run\.max_tokens: the run would never end"),
    (
        ["run.max_tokens=100000", "parallel.global_batch_size=1000"],
        r"run\.max_tokens: 100000 is less than one step",
    ),
    (["run.resume=no/such"], r"run\.resume: no/such does not exist"),
    # layout and batches
    (["run.devices=2", "parallel.layout=dp2"], r"parallel\.layout: layout 'dp2' is not understood"),
    (["run.devices=2", "parallel.layout=dp2-tp2-pp1"], r"parallel\.layout: .* = 4 ranks but there are 2"),
    (["run.devices=4", "parallel.layout=dp1-tp4-pp1"], r"parallel\.layout: .*n_kv_heads=2 does not divide"),
    (
        ["run.devices=8", "parallel.layout=dp1-tp1-pp8"],
        r"parallel\.layout: .*8 pipeline stages for n_layers=4",
    ),
    (
        ["run.devices=4", "parallel.layout=dp4-tp1-pp1", "parallel.global_batch_size=6"],
        r"parallel\.global_batch_size: .*does not divide by 4 .*: use 4 or 8$",
    ),
    (
        ["run.devices=1", "parallel.global_batch_size=1"],
        r"parallel\.global_batch_size: .* one micro-batch .*: use 2,",
    ),
    # copus
    (["copus.policy=ramp"], r"copus\.ramp: copus\.policy=ramp needs one"),
    (["copus.policy=ramp", "copus.ramp=4 8"], r"copus\.ramp: ramp '4' is not understood"),
    (
        ["copus.policy=ramp", "copus.ramp=0:4 1M:7", "run.devices=2"],
        r"copus\.ramp: 7 does not divide .*: use 6 or 8$",
    ),
    (["copus.ramp=0:4 1M:8"], r"copus\.ramp: copus\.policy=copus does not read it"),
    (["copus.objective=lr_aware", "copus.learning_rate_rule=none"], r"copus\.objective: lr_aware needs"),
    (
        ["copus.micro_batch_sizes=[2]"],
        r"parallel\.micro_batch_size: 1 is not among copus\.micro_batch_sizes \[2\]",
    ),
    (
        ["profiling.micro_batch_sizes=[1, 2]"],
        r"profiling\.micro_batch_sizes: 4 of copus\.micro_batch_sizes is missing",
    ),
    (["profiling.accumulations=[4, 4]"], r"profiling\.accumulations: a fit needs two different numbers"),
    (
        [
            "run.devices=2",
            "parallel.micro_batch_size=2",
            "copus.micro_batch_sizes=[2]",
            "copus.global_batch_sizes=[4, 7]",
        ],
        r"copus\.global_batch_sizes: 7 does not divide into micro-batches in any layout: use 6 or 8$",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSALS, ids=[" ".join(each[0]) for each in REFUSALS])
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        load(None, overrides)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [1\nx: 2", r"config .*config\.yaml, line 2, is not valid YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}", r"config .*, line 2, is not valid YAML: found duplicate key run"),
        ("- 1\n- 2\n", r"config .* must be sections with keys"),
        ("run: 3\n", r"run: this is a section: put its keys below it"),
        ("lr: 3\n", r"lr: unknown key, did you mean optimizer\.lr\?"),
        ("run:\n  run_dir: ${nothing.here}\n", r"run\.run_dir: Interpolation key 'nothing\.here' not found"),
        ("run:\n  run_dir: ${data.seed\n", r"run\.run_dir: |config .*"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        load(write(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml does not exist"):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        load(tmp_path)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing yet\n")) == Config()


def test_configs_made_in_code_are_validated_too() -> None:
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: "):
        Config(model=replace(ModelConfig(), vocab_size=100))


def test_loggers_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^run\.loggers: mlflow is not installed: pip install mlflow"):
        load(None, ["run.loggers=[csv, mlflow]"])


# -- what follows from a configuration -------------------------------------------------------------------


def test_the_first_configuration_takes_the_first_layout_whose_batch_divides() -> None:
    config = load(None, ["parallel.global_batch_size=6", "run.devices=auto"])
    assert config.run.world_size is None
    assert config.first_configuration(2).layout == Layout(data=2)
    assert config.first_configuration(4).layout == Layout(data=2, pipeline=2)
    with pytest.raises(ConfigError, match=r"^parallel\.layout: "):
        load(None, ["parallel.layout=dp4-tp1-pp1"]).check_world_size(2)


def test_nodes_count(tmp_path: Path) -> None:
    assert load(None, ["run.devices=2", "run.num_nodes=2"]).run.world_size == 4


def test_the_token_schedule_follows_the_run() -> None:
    schedule = load(
        None, ["schedule.kind=wsd", "schedule.decay_tokens=1e6", "schedule.min_ratio=0"]
    ).token_schedule
    assert schedule(25_000) == 0.5
    assert schedule(1_000_000) == 1.0 and schedule(1_500_000) == 0.5 and schedule(2_000_000) == 0.0
    endless = [
        "schedule.kind=constant",
        "run.max_tokens=null",
        "run.max_seconds=5",
        "schedule.warmup_tokens=10",
    ]
    assert load(None, endless).token_schedule(10**12) == 1.0
    assert load(None, ["schedule.total_tokens=100_000", "run.max_tokens=1e6"]).token_schedule(
        100_000
    ) == pytest.approx(0.1)


def test_hugging_face_fields_hold_the_named_and_the_extra_ones() -> None:
    model = load(None, ["model.extra={attention_bias: true}"]).model
    assert model.hugging_face_fields()["attention_bias"] is True
    assert model.hugging_face_fields()["rope_theta"] == 10000.0
    assert not {"model_type", "extra"} & set(model.hugging_face_fields())


def test_the_schema_loads_without_torch() -> None:
    code = "import json, sys, copus_lightning.config; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"torch", "lightning", "deepspeed", "transformers"} & set(json.loads(loaded))
