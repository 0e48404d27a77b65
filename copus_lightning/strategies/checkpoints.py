"""A run's checkpoints, the same for Fabric and Trainer: the engine's state, and what the session and the user add."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import _PATH

from copus_lightning.core.layout import Configuration
from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine.checkpoint_contents import read_state
from copus_lightning.engine.checkpoint_format import Manifest, moment_key
from copus_lightning.engine.checkpoint_planners import read_tensors
from copus_lightning.strategies.session import Facade, Session

Names = Mapping[str, str | None]
"""Under which names a script keeps its ``model`` and its ``optimizer``; None for what it did not save."""


def save_run(session: Session, path: _PATH, entries: Mapping[str, Any], names: Names) -> None:
    """Writes a checkpoint. Collective, between two optimizer steps.

    Args:
        session: Of the strategy.
        path: The folder.
        entries: The user's own, ready for ``torch.save``; rank 0's count.
        names: Without an optimizer the weights alone are saved.
    """
    started = time.perf_counter()
    session.checkpointer.save(
        path,
        {"entries": dict(entries), "data": session.saved_data_state()},
        optimizer=names.get("optimizer") is not None,
        labels={"names": dict(names), "entries": list(entries)},
        asynchronous=session.options.async_save,
    )
    session.book("checkpointing", time.perf_counter() - started)


def load_run(
    session: Session,
    path: _PATH,
    optimizer: bool = True,
    check: Callable[[Manifest], None] = lambda manifest: None,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Takes up a checkpoint, saved in whatever layout and by however many ranks. Collective.

    With the optimizer it is the run that goes on: its step counts and hyperparameters, its random generators, its
    place in the data, and its global batch and micro-batch as far as they fit the present layout. Without it the
    weights alone are loaded. After an error nothing was changed.

    Args:
        session: Of the strategy.
        path: The folder.
        optimizer: Also what is not the weights.
        check: May refuse by a ``ValueError`` or ``KeyError``.
        weights_only: As for ``torch.load``, for the user's own entries.

    Returns:
        The user's own entries.
    """
    started = time.perf_counter()
    saved: list[Manifest] = []

    def check_all(manifest: Manifest, state: dict[str, Any]) -> None:
        check(manifest)
        if "entries" not in state:
            raise ValueError(f"{path} was not saved by a strategy: load it as it was saved")
        if optimizer and session.train_loader is not None and state["data"] is not None:
            session.train_loader.check_state_dict(state["data"])
        saved.append(manifest)

    state = session.checkpointer.load(path, optimizer=optimizer, check=check_all, weights_only=weights_only)
    if optimizer:
        assert session.configuration is not None
        was = Configuration.from_dict(saved[0].training["configuration"])
        configuration = fitting(was, session.configuration)
        if configuration.global_batch_size != was.global_batch_size:
            rank_zero_warn(
                f"{path}: its global batch of {was.global_batch_size} does not divide by the "
                f"{configuration.layout.data} data ranks of {configuration.layout}: the run goes on with "
                f"{configuration.global_batch_size}"
            )
        session.go_on(configuration, state["data"])
    session.book("checkpointing", time.perf_counter() - started)
    return state["entries"]


def names_in(state: Mapping[str, Any], session: Session) -> dict[str, str | None]:
    """Under which names a script's dict has the model and the optimizer that were set up.

    Raises:
        ValueError: The model is there twice, or the optimizer without the model.
    """
    handle = session.engine.assembler.handle.optimizer if session.engine is not None else None
    models = [name for name, value in state.items() if isinstance(value, Facade)]
    optimizers = [name for name, value in state.items() if handle is not None and value is handle]
    if len(models) > 1 or len(optimizers) > 1:
        twice = (models if len(models) > 1 else optimizers)[:2]
        raise ValueError(f"state has the same object under two names, {twice}: leave one out")
    if optimizers and not models:
        raise ValueError(
            f"state[{optimizers[0]!r}] is the optimizer: its state goes with the model, add that too"
        )
    return {"model": next(iter(models), None), "optimizer": next(iter(optimizers), None)}


def load_entries(
    session: Session,
    path: _PATH,
    state: Mapping[str, Any],
    names: Names,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads model and optimizer if ``state`` has them; returns the user's other saved entries.

    Raises:
        KeyError: ``strict`` is set, and ``state`` asks for what was not saved under this name.
    """

    def check(manifest: Manifest) -> None:
        saved = read_names(manifest)
        for kind, name in names.items():
            if name is not None and saved[kind] != name:
                what = f"saved its {kind} as {saved[kind]!r}" if saved[kind] else f"holds no {kind}"
                raise KeyError(f"the state has the {kind} as {name!r}, but {path} {what}")
        missing = [
            n for n in state if n not in names.values() and n not in manifest.labels.get("entries", [])
        ]
        if strict and missing:
            raise KeyError(
                f"the state has a key {missing[0]!r} that {path} does not hold: leave it out or pass strict=False"
            )

    if names["model"] is not None:
        with_optimizer = names["optimizer"] is not None
        return load_run(session, path, with_optimizer, check, weights_only)
    check(_opened(path)[1])
    return read_entries(path, weights_only)


def fitting(saved: Configuration, present: Configuration) -> Configuration:
    """A saved run's batch and micro-batch in the present layout, as far as they divide."""
    samples, rest = divmod(saved.global_batch_size, present.layout.data)
    if rest:
        return present
    wishes = (saved.micro_batch_size, present.micro_batch_size, math.gcd(samples, saved.micro_batch_size))
    micro = next(micro for micro in wishes if samples % micro == 0)
    return replace(present, global_batch_size=saved.global_batch_size, micro_batch_size=micro)


def read_names(manifest: Manifest) -> dict[str, str | None]:
    """Under which names a checkpoint's model and optimizer were saved."""
    return manifest.labels.get("names", {"model": "model", "optimizer": "optimizer"})


def read_entries(path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
    """The user's own entries alone."""
    folder, _ = _opened(path)
    return read_state(folder, weights_only)["state"]["entries"]


def read_whole(path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
    """Everything, on this process: whole fp32 weights by name, and the optimizer's state by parameter name."""
    folder, manifest = _opened(path)
    content = read_state(folder, weights_only)
    names, tensors = read_names(manifest), read_tensors(folder, manifest.keys)
    whole: dict[str, Any] = dict(content["state"]["entries"])
    if names["model"] is not None:
        weights = {name: tensors[name] for name in manifest.tensors}
        weights |= {name: tensors[first] for name, first in manifest.model["tied"].items()}
        whole[names["model"]] = weights
    if names["optimizer"] is not None and manifest.optimizer is not None:
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        saved = content["optimizer"]
        for index, group in enumerate(manifest.optimizer["groups"]):
            groups.append({**saved["hyperparameters"][index], "params": group["tensors"]})
            if manifest.optimizer["stepped"]:
                for name in group["tensors"]:
                    moments = {key: tensors[moment_key(key, name)] for key in group["moments"]}
                    state[name] = {**moments, **saved["scalars"].get(index, {})}
        whole[names["optimizer"]] = {"state": state, "param_groups": groups}
    return whole


def _opened(path: _PATH) -> tuple[Path, Manifest]:
    folder = files.resolve(path)
    manifest = Manifest.read(folder)
    files.check_files(folder, manifest)
    return folder, manifest
