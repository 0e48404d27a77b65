"""Checkpoints of `copus fit`: which one to go on from, when to write one, and which to keep."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from copus_lightning.config import Config, ConfigError
from copus_lightning.core.layout import Configuration
from copus_lightning.engine.checkpoint_format import (
    Manifest,
    complete_ones,
    read_complete,
    remove,
    remove_leftovers,
    resolve,
)

KEPT = 2
"""Should the last one turn out to be damaged, there is the one before."""


def directory(config: Config) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.run.run_dir) / "checkpoints"


def find_resume(config: Config) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    Raises:
        ConfigError: `run.resume` names none.
    """
    if config.run.resume is None:
        return None
    if config.run.resume == "auto":
        return _find_newest(directory(config))
    try:
        Manifest.read(resolve(config.run.resume))
    except ValueError as error:
        raise ConfigError(f"run.resume: {error}") from None
    return Path(config.run.resume)


def _find_newest(folder: Path) -> Path | None:
    found = next(iter(complete_ones(folder)), None)
    if found is None:
        # A run is not begun anew, and its checkpoints set aside, because none of them can be read.
        for path in sorted(folder.glob("step-*"), reverse=True):
            try:
                read_complete(path)
            except (ValueError, OSError) as error:
                raise ConfigError(
                    f"run.resume=auto: no checkpoint in {folder} is whole ({error}); mend it, or set run.resume=null "
                    "to start anew"
                ) from None
    return found


def check_model(path: Path, fingerprint: dict[str, Any]) -> None:
    """Refuses a checkpoint of another model before anything is launched.

    Raises:
        ConfigError: One line that names what differs.
    """
    difference = Manifest.read(resolve(path)).difference(fingerprint)
    if difference is not None:
        name, there, here = difference
        raise ConfigError(
            f"run.resume: {path} is of another model, its {name} is {there} and not {here}:"
            " set model as it was, or run.resume=null"
        )


def saved_configuration(path: Path, world_size: int) -> Configuration | None:
    """What the saved run was in; None if it had another number of ranks."""
    training = Manifest.read(resolve(path)).training
    same = training["world_size"] == world_size
    return Configuration.from_dict(training["configuration"]) if same else None


class Keeper:
    """Decides when a checkpoint is due, names it, and removes old ones.

    Args:
        config: The run.
        is_first_rank: Removes; other ranks do not.

    Attributes:
        damaged: Those that could not be read: they stay, but are not what a run could go back to.
    """

    def __init__(self, config: Config, is_first_rank: bool) -> None:
        self.every_tokens = config.run.checkpoint_every_tokens
        self.directory = directory(config)
        self.is_first_rank = is_first_rank
        self.damaged: set[Path] = set()
        self._next = self.every_tokens

    def start_at(self, tokens: int) -> None:
        """Counts from here."""
        if self.every_tokens is not None:
            self._next = (tokens // self.every_tokens + 1) * self.every_tokens

    def due(self, tokens: int) -> bool:
        """Whether to write one now."""
        if self._next is None or tokens < self._next:
            return False
        self.start_at(tokens)
        return True

    def path(self, step: int) -> Path:
        """Of the checkpoint after so many steps."""
        return self.directory / f"step-{step:08d}"

    def remove_old(self, last: Path) -> None:
        """Keeps the last two, and nothing of a save that was interrupted. First rank.

        A folder that is no readable checkpoint is not this run's to remove.

        Args:
            last: The checkpoint that was saved last, or is being written.
        """
        if not self.is_first_rank:
            return
        self.damaged.discard(last.absolute())  # it is written anew
        remove_leftovers(self.directory, but=last)
        saved_at = {}
        for path in self.directory.glob("step-*"):
            with contextlib.suppress(ValueError, OSError):
                if path.absolute() not in self.damaged:
                    saved_at[path] = read_complete(path).saved_at
        kept = KEPT - (saved_at.pop(last, None) is not None)
        # By age: a run that was taken back to an earlier checkpoint still has later steps of another course.
        for path in sorted(saved_at, key=saved_at.__getitem__)[:-kept]:
            remove(path)
