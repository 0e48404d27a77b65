"""Tells Trainer's loops how long their loaders are, and where in an epoch a resumed run goes on.

Trainer asks a loader for its length once, when it sets it up, and steers by that number: when an epoch is
over, when to validate, when schedulers of interval ``epoch`` step. A switch changes the length, and so does a
resume with another batch. This is the one place that reaches into the loops; it sets numbers and replaces no
behaviour.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning.pytorch as pl

from copus_lightning.data.loader import ElasticDataLoader


def follow_loaders(trainer: pl.Trainer, loader: ElasticDataLoader | None, stepped: bool = False) -> None:
    """Takes over the present lengths.

    Args:
        trainer: Its fit loop may not have been set up yet.
        loader: The training loader.
        stepped: The batch in hand has been trained on, as opposed to just having been fetched.
    """
    _follow_validation(trainer)
    fit_loop = trainer.fit_loop
    epoch_loop, combined, fetcher = fit_loop.epoch_loop, fit_loop._combined_loader, fit_loop._data_fetcher
    if loader is None or combined is None or fetcher is None:
        return
    progress = epoch_loop.batch_progress
    if stepped and epoch_loop._num_ready_batches_reached():
        return  # the epoch has ended by what was known when its last batch was fetched
    length = len(loader)
    if combined.limits is not None:
        combined.limits[:] = [math.inf]  # in place: the iteration under way holds this list
    fetcher.length = length
    n_batches = (
        progress.current.ready if progress.is_last_batch else _limited(length, trainer.limit_train_batches)
    )
    _set_length(trainer, n_batches)
    if stepped and 0 < n_batches <= progress.current.ready:
        # The batch has grown, and what is left of the epoch does not fill one: the step just made was the last.
        fit_loop.max_batches = progress.current.ready
        progress.is_last_batch = True
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def settle_epoch(trainer: pl.Trainer, loops: dict[str, Any]) -> dict[str, Any]:
    """A copy of the loops' saved state that is unambiguous about the epoch.

    Whoever loads it cannot compare its counters with the epoch's length: the batch may have changed since. And
    Trainer itself, if it is limited by steps, takes an epoch that has ended for one with a batch to go.

    - In the middle of an epoch: as it is.
    - The epoch was cut short, by ``max_steps`` or early stopping, and its end has begun: in the middle.
    - Its last batch is trained, before or while its end hooks run: the next epoch is to begin.
    - In between, after its validation: the end hooks are to come, so ``is_last_batch`` is set.

    Raises:
        RuntimeError: A batch has been fetched and not been trained on yet.
    """
    loops = copy.deepcopy(loops)
    fit = loops["fit_loop"]
    fit["state_dict"].pop("combined_loader", None)  # the place in the data is saved elsewhere
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    current = batches["current"]
    if current["ready"] > current["processed"]:
        raise RuntimeError(
            "a checkpoint cannot be saved while a batch is fetched and not trained: save it in on_train_batch_end "
            "or later"
        )
    over = current["ready"] > 0 and trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    ending = epochs["total"]["processed"] == epochs["total"]["started"]
    after_batch = current["completed"] < current["processed"]
    if over and (ending or after_batch):
        for progress in epochs["total"], epochs["current"]:
            progress.update(dict.fromkeys(progress, progress["started"]))
        batches["total"]["completed"] = batches["total"]["processed"]
        batches["current"] = dict.fromkeys(current, 0)
        batches["is_last_batch"] = False
        if after_batch:
            fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # as at the end of the batch
    elif over:
        batches["is_last_batch"] = True
    elif ending and current["ready"] > 0:
        for progress in epochs["total"], epochs["current"]:
            progress["processed"] = progress["completed"] = progress["started"] - 1
    return loops


def batches_before(trainer: pl.Trainer) -> int:
    """How many batches of the epoch under way a resumed run has had before it was saved."""
    epoch_loop = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    return progress.current.ready if epoch_loop.restarting and not progress.is_last_batch else 0


def resume_epoch(trainer: pl.Trainer) -> None:
    """Lets a resumed run go on where :func:`settle_epoch` says. Called before the first epoch."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    if not epoch_loop.restarting:
        return
    if progress.is_last_batch:
        _set_length(trainer, progress.current.ready)
    elif progress.current.ready == 0:
        epoch_loop.restarting = False  # else it would look for a validation to make up for


def _set_length(trainer: pl.Trainer, n_batches: int) -> None:
    trainer.fit_loop.max_batches = n_batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(n_batches * trainer.val_check_interval))


def _follow_validation(trainer: pl.Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop._combined_loader is None:
        return
    for index, loader in enumerate(loop._combined_loader.flattened):
        loop._max_batches[index] = _limited(len(loader), trainer.limit_val_batches)


def _limited(length: int, limit: Any) -> int:
    """What Trainer's ``limit_…_batches`` leave: a number of batches, or a part of them but at least one."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))
