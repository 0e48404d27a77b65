"""What goes into a checkpoint of an engine, and whether one belongs to this engine."""

from __future__ import annotations

import json
import pickle
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine.checkpoint_format import Manifest
from copus_lightning.engine.checkpoint_planners import stored_shapes

if TYPE_CHECKING:
    from copus_lightning.engine.engine import Engine

COMPUTES = ("hidden_act", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta")
"""What changes a model's computation and no shape, in a Hugging Face config."""

Scalars = dict[int, dict[str, Any]]
"""Step counts and the like, by index of the optimizer's param group."""


def describe_run(
    engine: Engine, scalars: Scalars | None, labels: Mapping[str, Any], earlier: float | None = None
) -> Manifest:
    """The manifest, still without files.

    Args:
        scalars: Empty before the first optimizer step; None if the weights are saved alone.
        labels: The caller's own.
        earlier: When the newest checkpoint in the folder was saved, after which this one counts as saved whatever the
            clock of this machine says.
    """
    description, handle = engine.assembler.description, engine.assembler.handle
    tensors = engine.assembler.state_map.tensors
    optimizer = None
    if scalars is not None:
        groups = [
            {
                "tensors": [t.name for t in tensors if t.group == index],
                "moments": list(handle.schemas[index].elementwise),
                "scalars": _readable(scalars.get(index, {})),
                "hyperparameters": _readable(handle.hyperparameters(index)),
            }
            for index in range(len(handle.optimizer.param_groups))
        ]
        optimizer = {"class": type(handle.optimizer).__name__, "stepped": bool(scalars), "groups": groups}
    return Manifest(
        saved_at=time.time() if earlier is None else max(time.time(), earlier + 1e-3),
        versions=_versions(),
        model={
            "class": type(description.skeleton).__name__,
            "config": _config(engine),
            "fingerprint": description.fingerprint(),
            "tied": description.tied,
        },
        tensors={t.name: list(t.shape) for t in tensors},
        optimizer=optimizer,
        training={
            "configuration": engine.configuration.to_dict(),
            "world_size": engine.world_size,
            "zero_stage": engine.settings.zero_stage,
            "precision": str(engine.settings.dtype).removeprefix("torch."),
        },
        labels=dict(labels),
    )


def check_fits(engine: Engine, folder: Path, manifest: Manifest, optimizer: bool) -> None:
    """Refuses a checkpoint of another model, or of another optimizer if that is to be loaded too.

    Raises:
        ValueError: One line that names the key and the fix.
    """
    _check_model(engine, folder, manifest)
    _check_keys(folder, manifest)
    if optimizer:
        _check_optimizer(engine, folder, manifest)


def _check_model(engine: Engine, folder: Path, manifest: Manifest) -> None:
    tensors = {t.name: t for t in engine.assembler.state_map.tensors}
    what = f"{folder} is of another model ({manifest.model['class']})"
    fix = "load it into the model that it was saved from"
    for name, tensor in tensors.items():
        if name not in manifest.tensors:
            raise ValueError(f"{what}: it has no parameter {name!r}; {fix}")
        if tuple(manifest.tensors[name]) != tensor.shape:
            sizes = f"{manifest.tensors[name]} there and {list(tensor.shape)} here"
            raise ValueError(f"{what}: the shape of {name!r} is {sizes}; {fix}")
    for name in manifest.tensors:
        if name not in tensors:
            raise ValueError(f"{what}: it has a parameter {name!r} that this model has not; {fix}")
    # Heads of another number may have weights of the same shapes.
    difference = manifest.difference(engine.assembler.description.fingerprint())
    if difference is not None:
        key, there, here = difference
        raise ValueError(f"{what}: its {key} is {there}, not {here}; {fix}")
    _warn_of_other_computation(engine, folder, manifest)


def _warn_of_other_computation(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Says so where the same weights would compute something else; it may be wished, as with a longer context."""
    if engine.rank != 0:
        return
    here = _config(engine)
    for key in COMPUTES:
        there = manifest.model["config"].get(key)
        if there != here.get(key):
            warnings.warn(
                f"{folder} was saved with {key}={there} in the model's config, here it is {here.get(key)}",
                stacklevel=2,
            )


def _config(engine: Engine) -> dict[str, Any]:
    """The model's Hugging Face config in plain values, as it is saved."""
    return json.loads(engine.assembler.description.config.to_json_string())


def _check_keys(folder: Path, manifest: Manifest) -> None:
    stored, expected = stored_shapes(folder), manifest.keys
    path = folder / files.METADATA
    for key in sorted(stored.keys() | expected.keys()):
        if stored.get(key) == expected.get(key):
            continue
        how = "lacks" if key not in stored else "holds another shape of" if key in expected else "holds"
        raise ValueError(f"{path} {how} {key!r}, unlike {files.MANIFEST}: load another checkpoint")


def _check_optimizer(engine: Engine, folder: Path, manifest: Manifest) -> None:
    handle, saved = engine.assembler.handle, manifest.optimizer
    fix = "build the optimizer as it was, or load the model without it"
    if saved is None:
        raise ValueError(f"{folder} holds weights alone: load the model without the optimizer")
    name = type(handle.optimizer).__name__
    if saved["class"] != name:
        raise ValueError(f"{folder} holds the state of {saved['class']}, the optimizer is {name}: {fix}")
    n_groups = len(handle.optimizer.param_groups)
    if len(saved["groups"]) != n_groups:
        raise ValueError(f"{folder} holds {len(saved['groups'])} param groups instead of {n_groups}: {fix}")
    for index, group in enumerate(saved["groups"]):
        own = {t.name for t in engine.assembler.state_map.tensors if t.group == index}
        for odd in sorted(own ^ set(group["tensors"])):
            raise ValueError(f"{folder} has {odd!r} in another param group than the optimizer: {fix}")
        moments = list(handle.schemas[index].elementwise)
        if group["moments"] != moments:
            raise ValueError(
                f"{folder} holds {group['moments']} of param group {index}, not {moments}: {fix}"
            )


def read_state(folder: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """What is not a tensor of the model or its optimizer.

    Raises:
        ValueError: It cannot be read with this ``weights_only``.
    """
    path = folder / files.STATE
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} holds other things than tensors and plain values: pass weights_only=False if you trust its "
            f"origin ({reason})"
        ) from None


def _versions() -> dict[str, str]:
    # All are loaded by now. The package itself is not imported from here: it names what is above the engine.
    names = (__name__.partition(".")[0], "torch", "transformers", "deepspeed")
    return {name: str(getattr(sys.modules.get(name), "__version__", "unknown")) for name in names}


def _readable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for people to read; the exact ones are in the state file."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        known = isinstance(value, (int, float, str, bool, list, tuple, type(None)))
        plain[key] = value if known else str(value)
    return plain
