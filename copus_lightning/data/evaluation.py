"""A DataLoader for validation: every sample once, in the dataset's order, under whatever layout is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

IGNORED = -100
"""Label of a position without a target, as in Hugging Face models."""


class EvaluationLoader:
    """Yields this data rank's share of consecutive batches of ``batch_size`` samples per data rank.

    The last batch is filled up so that all ranks make the same number of steps; what was filled in has its
    labels masked, so that a mean over target tokens is exact.

    Args:
        dataloader: A ``DataLoader`` over a map-style dataset. Its ``batch_size`` is per data rank; its sampler
            is not used.
        place: Returns this rank's data index and the number of data ranks, when an iteration starts.

    Raises:
        ValueError: The dataset cannot be indexed.
    """

    def __init__(self, dataloader: DataLoader, place: Callable[[], tuple[int, int]]) -> None:
        if isinstance(dataloader.dataset, IterableDataset) or not hasattr(dataloader.dataset, "__len__"):
            raise ValueError(
                f"the dataset {type(dataloader.dataset).__name__} cannot be indexed: validation needs a map-style "
                "dataset with __len__ and __getitem__"
            )
        self.dataset: Any = dataloader.dataset
        self.batch_size = dataloader.batch_size or 1
        self.sampler = dataloader.sampler
        self.batch_sampler = None
        self.num_workers = dataloader.num_workers
        self.persistent_workers = False
        self.worker_init_fn = dataloader.worker_init_fn
        self._dataloader, self._place = dataloader, place

    def __len__(self) -> int:
        return -(-len(self.dataset) // (self.batch_size * self._place()[1]))

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._place()
        n, share = len(self.dataset), self.batch_size
        steps = -(-n // (share * size))
        starts = [(step * size + rank) * share for step in range(steps)]
        indices = [[min(i, n - 1) for i in range(start, start + share)] for start in starts]
        source = self._dataloader
        loader = DataLoader(
            self.dataset,
            batch_sampler=indices,
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            pin_memory=source.pin_memory,
            worker_init_fn=self.worker_init_fn,
            timeout=source.timeout,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
        )
        for start, batch in zip(starts, loader, strict=True):
            yield mask_from(batch, max(min(n - start, share), 0))


def mask_from(batch: Any, n_valid: int) -> Any:
    """Masks the labels of the samples from ``n_valid`` on; adds labels to a batch that has none."""
    rows = batch["input_ids"].shape[0]
    if n_valid >= rows:
        return batch
    labels = batch.get("labels", batch["input_ids"]).clone()
    labels[n_valid:] = IGNORED
    assert isinstance(labels, torch.Tensor)
    return {**batch, "labels": labels}
