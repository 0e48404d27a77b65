"""Trainer's checkpoints: what Lightning keeps of a run becomes entries of the same folder that Fabric writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine.checkpoint_format import Manifest
from copus_lightning.strategies import checkpoints
from copus_lightning.strategies.lightning_module import WholeWeights
from copus_lightning.strategies.loop_lengths import settle_epoch
from copus_lightning.strategies.processes import Processes

NAMES = {"model": "model", "optimizer": "optimizer"}
"""Under which names a Fabric script finds the two."""

KEYWORDS = ("last", "best", "hpc")
"""Values of ``ckpt_path`` that Trainer turns into a path later on."""


class TrainerCheckpoints(Processes, ParallelStrategy):
    """The part of :class:`copus_lightning.CopusTrainerStrategy` that saves and loads.

    A checkpoint with the optimizer is a folder as :class:`copus_lightning.CopusStrategy` writes it. Its entries
    are what Lightning and the hooks put into the checkpoint, but for the model's weights and the optimizer's
    state, which the engine writes. One of the weights alone is Lightning's own file.

    Attributes:
        weights_only: What ``trainer.fit(weights_only=…)`` was called with.
    """

    weights_only: bool | None = None
    _weights: WholeWeights | None
    _obsolete: list[_PATH]

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # it is loaded with the model

    # -- save ------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The LightningModule's state, with the model's weights on ``meta``.

        Hooks see names and shapes, and may leave out or rename. Whole weights are gathered when a file of them
        is written; a folder never needs them.
        """
        assert self.lightning_module is not None
        if self.session.engine is None or self._weights is None:
            raise RuntimeError(
                "the weights were given up when fit() ended: save them while it runs, with ModelCheckpoint(…)"
            )
        return {**self.lightning_module.state_dict(), **self._weights.placeholders()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Nothing: the engine writes it."""
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Writes a folder, or a plain file if the optimizer is not in the checkpoint. All ranks, between two steps.

        Raises:
            ValueError: Something else is in the way, or a hook has computed with weights on ``meta``.
            RuntimeError: A batch has been fetched and not been trained on yet.
        """
        assert self.lightning_module is not None and self._weights is not None
        whole_run = "optimizer_states" in checkpoint
        entries = {name: value for name, value in checkpoint.items() if name != "optimizer_states"}
        if not whole_run:
            # On all ranks, so that all refuse.
            entries["state_dict"] = self._weights.filled_in(
                checkpoint["state_dict"], self.session.live.gather()
            )
            super().save_checkpoint(entries, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options is not supported: CopusTrainerStrategy writes to a file system")
        entries["state_dict"] = self._weights.others(checkpoint["state_dict"])
        entries["loops"] = settle_epoch(self.lightning_module.trainer, checkpoint["loops"])
        with self.replacing():  # it waits for the checkpoint before
            checkpoints.save_run(self.session, filepath, entries, NAMES)
            if self._is_linked():
                self.session.finish_saving()

    def _is_linked(self) -> bool:
        """Whether Lightning makes a link to the checkpoint as soon as it is told that there is one."""
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        return any(getattr(callback, "save_last", None) == "link" for callback in callbacks)

    # -- remove ----------------------------------------------------------------------------------------------

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Removes it, but not before the one that takes its place is complete."""
        if self.session.options.async_save and not os.path.isfile(filepath):
            self._obsolete = [*self._obsolete, filepath]
        else:
            self._remove([filepath])

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Removes what was to be removed once the block, which waits for the last checkpoint, has ended well.

        After an error it stays: the one that was to take its place may be the one that failed.
        """
        obsolete, self._obsolete = self._obsolete, []
        yield
        self._remove(obsolete)

    def _remove(self, paths: list[_PATH]) -> None:
        for path in paths:
            super().remove_checkpoint(path)

    # -- load ------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Takes up a run that Trainer saved, in whatever layout. All ranks.

        Raises:
            ValueError: It is not whole, is of another model or optimizer, or was not saved by Trainer; one line,
                and nothing was changed.
        """
        path = Processes.broadcast(self, checkpoint_path)
        refuse_file(path)
        # Lightning passes it on to strategies that load before they are set up, and to no other.
        trust = self.weights_only if weights_only is None else weights_only
        return checkpoints.load_run(
            self.session,
            path,
            check=lambda manifest: check_saved_by_trainer(path, manifest),
            weights_only=trust,
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """It is loaded with the model."""


def check_can_resume(path: _PATH | None) -> None:
    """Refuses what cannot be gone on from as far as can be told before any process is launched.

    Args:
        path: Trainer's ``ckpt_path``; what is not a path in a file system is not looked at.

    Raises:
        ValueError: One line that names the path and the fix.
    """
    if path is None or path in KEYWORDS or "://" in str(path) or str(path).startswith("registry:"):
        return
    refuse_file(path)
    check_saved_by_trainer(path, Manifest.read(files.resolve(path)))


def refuse_file(path: _PATH) -> None:
    """Refuses a plain file.

    Raises:
        ValueError: It is one.
    """
    if os.path.isfile(path):
        raise ValueError(
            f"ckpt_path: {path} is a file, not a folder that Trainer wrote with CopusTrainerStrategy: load "
            "weights from a file with load_from_checkpoint before fit()"
        )


def check_saved_by_trainer(path: _PATH, manifest: Manifest) -> None:
    """Refuses what Fabric saved: there is no state of Trainer's loops in it.

    Raises:
        ValueError: It was saved by Fabric.
    """
    if "pytorch-lightning_version" not in manifest.labels.get("entries", []):
        raise ValueError(
            f"ckpt_path: {path} was saved by fabric.save, without the state of Trainer's loops: go on with Fabric, "
            "or begin anew with its weights, which copus export writes for from_pretrained"
        )
