"""What has to hold within a section and between sections, whatever the number of ranks.

Each check yields lines that name a key and the fix, the most telling one first.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copus_lightning.core.baselines import parse_ramp

if TYPE_CHECKING:
    from copus_lightning.config.config import Config

_BYTE_VOCABULARY = 257  # 256 byte values and the end-of-file token
_EXPECTED = {"text": "file or folder", "tokens": ".bin or .npy file"}
_LOGGER_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "mlflow": ("mlflow",)}


def problems(config: Config) -> Iterator[str]:
    """Why a configuration cannot be run, one line each; nothing if it can."""
    for check in (_bounds, _model, _data, _optimizer_and_schedule, _run, _copus):
        yield from check(config)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`", did you mean X?"` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def _bounds(config: Config) -> Iterator[str]:
    """Each value within the bounds that its field declares."""
    for section in fields(config):
        for entry in fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), entry.name)
            key = f"{section.name}.{entry.name}"
            if isinstance(value, list) and not value and not entry.metadata.get("choices"):
                yield f"{key}: the list is empty: give at least one value"
            for each in value if isinstance(value, list) else [value]:
                if each is not None:
                    yield from _out_of_bounds(key, each, entry.metadata)


def _out_of_bounds(key: str, value: Any, bounds: Mapping[str, Any]) -> Iterator[str]:
    choices = bounds.get("choices")
    if choices is not None and value not in choices:
        fix = suggestion(str(value), map(str, choices)) or f": use {' | '.join(map(str, choices))}"
        yield f"{key}: {value!r} is not a choice{fix}"
    if isinstance(value, str):
        return
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: {value} is not a finite number"
    for name, holds, words in (
        ("at_least", lambda bound: value >= bound, "at least"),
        ("at_most", lambda bound: value <= bound, "at most"),
        ("above", lambda bound: value > bound, "above"),
        ("below", lambda bound: value < bound, "below"),
    ):
        if name in bounds and not holds(bounds[name]):
            yield f"{key}: must be {words} {bounds[name]}, got {value}"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    for key in model.extra:
        if hasattr(model, str(key)):
            yield f"model.extra.{key}: this field has a place of its own: set model.{key}"
    if model.hidden_size % heads and "head_dim" not in model.extra:
        yield (
            f"model.hidden_size: {model.hidden_size} does not divide by num_attention_heads={heads}:"
            f" use a multiple of {heads}, or set model.extra.head_dim"
        )
    if heads % kv_heads:
        yield (
            f"model.num_key_value_heads: {kv_heads} does not divide num_attention_heads={heads}:"
            f" use one of {', '.join(str(size) for size in range(1, heads + 1) if heads % size == 0)}"
        )


def _data(config: Config) -> Iterator[str]:
    data, model = config.data, config.model
    if data.sequence_length > model.max_position_embeddings:
        yield (
            f"data.sequence_length: {data.sequence_length} is longer than"
            f" model.max_position_embeddings={model.max_position_embeddings}: shorten it or raise the latter"
        )
    if data.tokenizer is None and data.kind in ("bytes", "text") and model.vocab_size < _BYTE_VOCABULARY:
        yield (
            f"model.vocab_size: {model.vocab_size} is too small for data.kind={data.kind}:"
            f" use {_BYTE_VOCABULARY} or more (256 bytes and an end-of-file token)"
        )
    if data.tokenizer is not None and data.kind != "text":
        yield f"data.tokenizer: data.kind={data.kind} does not read it: set data.kind=text, or use null"
    if data.kind == "bytes":
        if data.path is not None:
            yield f"data.path: data.kind=bytes does not read {data.path}: set data.kind=text or tokens"
        return
    if not data.path:
        yield f"data.path: data.kind={data.kind} needs one: give it as data.path=..., or set data.kind=bytes"
        return
    path = Path(data.path)
    if not path.exists():
        yield f"data.path: {data.path} does not exist: give an existing {_EXPECTED[data.kind]}"
    elif data.kind == "tokens" and not (path.is_file() and path.suffix in (".bin", ".npy")):
        yield f"data.path: {data.path} is not a {_EXPECTED['tokens']}: convert it, or set data.kind=text"


def _optimizer_and_schedule(config: Config) -> Iterator[str]:
    optimizer, schedule = config.optimizer, config.schedule
    if len(optimizer.betas) != 2:
        yield f"optimizer.betas: adamw has two, got {len(optimizer.betas)}: use a list like [0.9, 0.95]"
    if optimizer.name == "adamw" and optimizer.momentum:
        yield "optimizer.momentum: adamw has none: leave it 0, or set optimizer.name=sgd"
    if schedule.kind == "wsd" and schedule.decay_tokens is None:
        yield "schedule.decay_tokens: schedule.kind=wsd needs the length of its decay: set it"
    if schedule.kind != "wsd" and schedule.decay_tokens is not None:
        yield (
            f"schedule.decay_tokens: schedule.kind={schedule.kind} does not read it:"
            " set schedule.kind=wsd, or use null"
        )
    if schedule.kind == "constant":
        return
    total = schedule.total_tokens or config.run.max_tokens
    if total is None:
        yield (
            f"schedule.total_tokens: schedule.kind={schedule.kind} has to end and run.max_tokens is null too:"
            " set one of them, or schedule.kind=constant"
        )
    elif schedule.warmup_tokens + (schedule.decay_tokens or 1) > total:
        decay = f" and decay_tokens={schedule.decay_tokens}" if schedule.decay_tokens else ""
        yield (
            f"schedule.warmup_tokens: {schedule.warmup_tokens}{decay} do not fit into the schedule's {total}"
            " tokens: shorten them"
        )


def _run(config: Config) -> Iterator[str]:
    run = config.run
    if isinstance(run.devices, str) and run.devices != "auto":
        yield f"run.devices: {run.devices!r} is neither a number of ranks per node nor auto"
    if run.max_tokens is None and run.max_seconds is None and run.target_loss is None:
        yield "run.max_tokens: the run would never end: set it, run.max_seconds or run.target_loss"
    step_tokens = config.parallel.global_batch_size * config.data.sequence_length
    if run.max_tokens is not None and run.max_tokens < step_tokens:
        yield f"run.max_tokens: {run.max_tokens} is less than one step of {step_tokens} tokens: raise it"
    if not run.run_dir or Path(run.run_dir).is_file():
        yield f"run.run_dir: {run.run_dir!r} is not a folder: name one to create or to continue"
    if run.resume not in (None, "auto") and not Path(run.resume).exists():
        yield f"run.resume: {run.resume} does not exist: give a checkpoint, auto or null"
    for name in run.loggers:
        modules = _LOGGER_MODULES.get(name, ())
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            yield f"run.loggers: {name} is not installed: pip install {modules[0]}, or take it out"


def _copus(config: Config) -> Iterator[str]:
    copus, parallel = config.copus, config.parallel
    if config.profile_path.is_dir():
        yield f"copus.profile: {config.profile_path} is a folder: give a file, or null"
    if copus.objective == "lr_aware" and copus.learning_rate_rule == "none":
        yield (
            "copus.objective: lr_aware needs a learning rate that follows the batch:"
            " set copus.learning_rate_rule=sqrt, or copus.objective=goodput"
        )
    if copus.policy == "ramp" and not copus.ramp:
        yield 'copus.ramp: copus.policy=ramp needs one, like "0:4 500K:8 1M:16"'
    if copus.ramp:
        try:
            parse_ramp(copus.ramp)
        except ValueError as error:
            yield f"copus.ramp: {error}"
    if copus.policy != "ramp" and copus.ramp is not None:
        yield f"copus.ramp: copus.policy={copus.policy} does not read it: set copus.policy=ramp, or use null"
    if copus.policy == "copus" and parallel.micro_batch_size not in copus.micro_batch_sizes:
        yield (
            f"parallel.micro_batch_size: {parallel.micro_batch_size} is not among copus.micro_batch_sizes"
            f" {copus.micro_batch_sizes}: add it there"
        )
    missing = sorted(set(copus.micro_batch_sizes) - set(config.profiled_micro_batch_sizes))
    if missing:
        yield (
            f"profiling.micro_batch_sizes: {missing[0]} of copus.micro_batch_sizes is missing:"
            " add it, or use null"
        )
    if len(set(config.profiling.accumulations)) < 2:
        yield "profiling.accumulations: a fit needs two different numbers: use a list like [1, 2, 4]"
