"""Tells Trainer's loops how long their loaders are.

Trainer asks a loader for its length once, when it sets it up, and steers by that number: when an epoch is
over, when to validate, when schedulers of interval ``epoch`` step. A switch changes the length. This is the
one place that reaches into the loops; it sets numbers and replaces no behaviour.
"""

from __future__ import annotations

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
    fit_loop.max_batches = n_batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(n_batches * trainer.val_check_interval))
    if stepped and 0 < n_batches <= progress.current.ready:
        # The batch has grown, and what is left of the epoch does not fill one: the step just made was the last.
        fit_loop.max_batches = progress.current.ready
        progress.is_last_batch = True
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _follow_validation(trainer: pl.Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop._combined_loader is None:
        return
    for index, loader in enumerate(loop._combined_loader.flattened):
        loop._max_batches[index] = _limited(len(loader), trainer.limit_val_batches)


def _limited(length: int, limit: Any) -> int:
    """What Trainer's ``limit_…_batches`` leave: a number of batches, or a part of them but at least one."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))
