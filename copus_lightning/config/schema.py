"""The sections of a run's YAML, each field with its default, meaning, unit and bounds.

The metadata of a field is the only place that describes it: the commented YAML of `copus config`, the range
checks and the error messages all read it from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from copus_lightning.core.layout import ModelShape


class ConfigError(ValueError):
    """One line that names the key and the fix."""


def _entry(default: Any, comment: str, **bounds: Any) -> Any:
    """A field with its comment and, as `bounds`, any of `choices`, `at_least`, `at_most`, `above`, `below`.

    A tuple stands for a fresh list of the same values, and a type for a fresh empty one of it. On a list, the
    bounds hold for each element.
    """
    metadata = {"comment": comment, **bounds}
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The decoder, built from these fields of a Hugging Face config; nothing is downloaded."""

    model_type: str = _entry("llama", "Hugging Face model type")
    hidden_size: int = _entry(256, "width of the residual stream", at_least=1)
    intermediate_size: int = _entry(688, "width of the feed-forward part", at_least=1)
    num_hidden_layers: int = _entry(4, "transformer layers", at_least=1)
    num_attention_heads: int = _entry(4, "query heads per layer", at_least=1)
    num_key_value_heads: int = _entry(
        2, "key and value heads per layer; a divisor of the query heads", at_least=1
    )
    vocab_size: int = _entry(
        257, "rows of the embedding table; bytes and their end-of-file token need 257", at_least=1
    )
    max_position_embeddings: int = _entry(1024, "longest sequence the model is made for (tokens)", at_least=1)
    rope_theta: float = _entry(10000.0, "base of the rotary position embedding", above=0)
    tie_word_embeddings: bool = _entry(False, "output head shares the embedding's weight")
    rms_norm_eps: float = _entry(1e-5, "epsilon of the normalisation layers", above=0)
    extra: dict[str, Any] = _entry(dict, "any other field of the Hugging Face config, passed on as it is")

    def hugging_face_fields(self) -> dict[str, Any]:
        """Keyword arguments for `AutoConfig.for_model(model_type, ...)`."""
        named = {key: value for key, value in vars(self).items() if key not in ("model_type", "extra")}
        return {**named, **self.extra}

    def shape(self) -> ModelShape:
        """The sizes that decide which layouts the model fits."""
        return ModelShape(
            n_layers=self.num_hidden_layers,
            n_heads=self.num_attention_heads,
            n_kv_heads=self.num_key_value_heads,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
        )


@dataclass
class DataConfig:
    """Where the training text comes from. A sample is one sequence."""

    kind: str = _entry(
        "bytes",
        "bytes (built in: Python's own sources), text (your files), tokens (a file)",
        choices=("bytes", "text", "tokens"),
    )
    path: str | None = _entry(None, "text: file or folder; tokens: .bin or .npy file; bytes: null")
    tokenizer: str | None = _entry(None, "text: folder or name of a Hugging Face tokenizer; null is bytes")
    dtype: str = _entry("uint16", "number type of a .bin file", choices=("uint16", "uint32"))
    sequence_length: int = _entry(128, "length of one sample (tokens)", at_least=2)
    validation_fraction: float = _entry(
        0.05, "share held out for validation; bytes holds out 1 file of 20", above=0, below=1
    )
    num_workers: int = _entry(0, "processes that load data, per rank; 0 is none", at_least=0)
    seed: int = _entry(0, "seed of the order of the samples", at_least=0)


@dataclass
class OptimizerConfig:
    """The optimizer. Its learning rate is meant for copus.reference_batch_size."""

    name: str = _entry("adamw", "optimizer", choices=("adamw", "sgd"))
    lr: float = _entry(1e-3, "learning rate, before schedule and batch-size rule", above=0)
    betas: list[float] = _entry((0.9, 0.95), "decay of adamw's two moments", at_least=0, below=1)
    eps: float = _entry(1e-8, "adamw's epsilon", above=0)
    weight_decay: float = _entry(0.1, "weight decay per step, times the learning rate", at_least=0)
    momentum: float = _entry(0.0, "momentum of sgd", at_least=0, below=1)
    decay_matrices_only: bool = _entry(True, "no weight decay on norms and biases")


@dataclass
class ScheduleConfig:
    """Learning rate over time. Lengths are tokens, so that a changing batch does not stretch them."""

    kind: str = _entry("cosine", "shape after the warm-up", choices=("constant", "cosine", "linear", "wsd"))
    warmup_tokens: int = _entry(50_000, "linear rise from 0 (tokens)", at_least=0)
    decay_tokens: int | None = _entry(None, "for wsd alone: length of the final decay (tokens)", at_least=1)
    total_tokens: int | None = _entry(None, "end of the decay (tokens); null is run.max_tokens", at_least=1)
    min_ratio: float = _entry(0.1, "where the decay ends, as a share of lr", at_least=0, at_most=1)


@dataclass
class RunConfig:
    """Machine, length and output of the run. It ends at the first of max_tokens, max_seconds, target_loss."""

    accelerator: str = _entry("auto", "device type", choices=("auto", "cpu", "gpu", "cuda"))
    devices: int | str = _entry("auto", "ranks per node; auto is every GPU, or one CPU process", at_least=1)
    num_nodes: int = _entry(1, "nodes", at_least=1)
    precision: str = _entry(
        "32-true",
        "number type of the compute; masters are fp32",
        choices=("32-true", "bf16-mixed", "bf16-true"),
    )
    max_tokens: int | None = _entry(2_000_000, "train for so many tokens; null for no limit", at_least=1)
    max_seconds: float | None = _entry(None, "train for so long (seconds); null for no limit", above=0)
    target_loss: float | None = _entry(
        None, "train until the validation loss is this (nats per token)", above=0
    )
    validate_every_tokens: int = _entry(200_000, "tokens between validations", at_least=1)
    validation_batches: int = _entry(8, "global batches per validation", at_least=1)
    log_every_steps: int = _entry(
        10, "steps between updates of the loggers; metrics.csv has every step", at_least=1
    )
    gradient_clip_norm: float | None = _entry(
        1.0, "largest global gradient norm; null does not clip", above=0
    )
    seed: int = _entry(0, "seed of the weights", at_least=0)
    run_dir: str = _entry("runs/default", "folder of records, plots and checkpoints")
    resume: str | None = _entry(
        None, "null starts anew, auto takes the newest checkpoint in run_dir, or a path"
    )
    checkpoint_every_tokens: int | None = _entry(
        None, "tokens between checkpoints; null keeps none", at_least=1
    )
    loggers: list[str] = _entry(
        list,
        "besides metrics.csv: csv, tensorboard, wandb, mlflow",
        choices=("csv", "tensorboard", "wandb", "mlflow"),
    )

    @property
    def world_size(self) -> int | None:
        """Ranks of the run; None while `devices` is auto."""
        return self.devices * self.num_nodes if isinstance(self.devices, int) else None


@dataclass
class ParallelConfig:
    """The configuration that the run starts in."""

    layout: str | None = _entry(
        None, "parallel sizes, like dp4-tp1-pp2; null takes the fastest of the profile"
    )
    global_batch_size: int = _entry(4, "samples per optimizer step", at_least=1)
    micro_batch_size: int = _entry(1, "samples per forward and backward of one data rank", at_least=1)
    zero_stage: int = _entry(
        1, "1 shards the optimizer's state over the data ranks, 0 does not", choices=(0, 1)
    )
    timeout_seconds: float = _entry(1800.0, "longest wait for another rank (seconds)", above=0)


@dataclass
class CopusConfig:
    """What may change while the run trains, and on what grounds."""

    policy: str = _entry(
        "copus",
        "copus (best Goodput), critical_batch (c * noise scale), ramp, static",
        choices=("copus", "critical_batch", "ramp", "static"),
    )
    objective: str = _entry("goodput", "what copus maximises", choices=("goodput", "lr_aware"))
    profile: str | None = _entry(
        None, "throughput profile, measured if missing; null is RUN_DIR/profile.json"
    )
    global_batch_sizes: list[int] = _entry(
        (4, 8, 16, 32, 64), "global batches to choose from (samples)", at_least=1
    )
    micro_batch_sizes: list[int] = _entry((1, 2, 4, 8), "micro-batches to choose from (samples)", at_least=1)
    allow_layout: bool = _entry(True, "false changes the batch alone")
    critical_batch_coefficient: float = _entry(2.0, "c: critical batch = c * noise scale", above=0)
    threshold: float = _entry(0.1, "least gain in Goodput worth a new layout, as a share", at_least=0)
    batch_threshold: float = _entry(0.02, "the same for a new batch alone, which costs nothing", at_least=0)
    max_batch_growth: float | None = _entry(
        2.0, "largest growth of the batch per decision, a factor; null is any", above=1
    )
    decide_every_tokens: int = _entry(16_384, "tokens between decisions", at_least=1)
    cooldown_tokens: int = _entry(32_768, "tokens without another layout after a new one", at_least=0)
    dwell_seconds: float | None = _entry(
        60.0, "time a new layout has to pay off (seconds); null is the rest of the run", above=0
    )
    noise_half_life_samples: float = _entry(
        256.0, "half-life of the noise scale's averages (samples)", above=0
    )
    measure_cost_fraction: float = _entry(
        0.01, "largest share of time spent on measuring the noise scale", above=0, at_most=1
    )
    learning_rate_rule: str = _entry(
        "sqrt", "learning rate as the batch changes", choices=("none", "linear", "sqrt", "surge")
    )
    reference_batch_size: int | None = _entry(
        None, "batch that lr is meant for (samples); null is parallel.global_batch_size", at_least=1
    )
    ramp: str | None = _entry(None, "for policy ramp, tokens:batch pairs like '0:4 500K:8 1M:16'")


@dataclass
class ProfilingConfig:
    """What `copus profile` measures: every layout that fits, with every micro-batch."""

    accumulations: list[int] = _entry(
        (1, 2, 4, 8), "micro-batches per step to measure; 3 or more show the fit's error", at_least=1
    )
    repeats: int = _entry(3, "timed steps per point; the median counts", at_least=1)
    warmup_steps: int = _entry(1, "untimed steps before them", at_least=0)
    micro_batch_sizes: list[int] | None = _entry(
        None, "micro-batches to measure (samples); null is copus.micro_batch_sizes", at_least=1
    )
