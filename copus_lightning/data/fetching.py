"""What runs beside the dataset: random numbers by global position, and giving up on work nobody waits for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from copus_lightning.data.sampler import ElasticBatchSampler, mix


class StaleStepError(Exception):
    """The step was drawn before a reconfiguration; its result is thrown away by whoever receives it."""


class Step(NamedTuple):
    """What one data rank fetches for one optimizer step."""

    generation: int
    seed: int
    start: int  # global position of the first sample
    indices: list[int]  # dataset indices at positions start, start + 1, …


class Steps:
    """The batch sampler of the inner DataLoader: endless steps from the sampler's position when iterated.

    Args:
        sampler: Where to begin and how to share.
        generation: Shared counter that a reconfiguration raises, or None when nothing is fetched ahead.
    """

    def __init__(self, sampler: ElasticBatchSampler, generation: Any | None) -> None:
        self.sampler = sampler
        self.generation = generation

    def __iter__(self) -> Iterator[Step]:
        generation = self.generation.value if self.generation is not None else 0
        seed = self.sampler.order.seed
        return (Step(generation, seed, start, indices) for start, indices in self.sampler.steps())


class PositionSeededDataset(Dataset):
    """The user's dataset, with the random numbers of a sample a function of its global position.

    Before a sample is fetched, and before a step is collated, the global generators of `random`, numpy and
    torch (CPU) are seeded from the run's seed and the global position. So a random crop or a masking collate
    function gives tensor and pipeline peers the same batch, and the same again after a resume, whatever
    worker does it. A dataset with ``__getitems__`` (as `Subset` and Hugging Face datasets have) is seeded
    once for the whole step.

    Reads and writes of other attributes go to the user's dataset, for the ``worker_init_fn`` that opens files
    through ``get_worker_info().dataset``.

    Args:
        dataset: Map-style dataset.
        generation: Shared counter; steps of an older generation are given up between two samples.
    """

    dataset: Any
    generation: Any | None

    def __init__(self, dataset: Any, generation: Any | None) -> None:
        object.__setattr__(self, "dataset", dataset)
        object.__setattr__(self, "generation", generation)

    def __getitems__(self, step: Step) -> list[Any]:
        """Samples of one step, in order; leaves the generators seeded for the collation that follows."""
        samples: list[Any]
        if getattr(self.dataset, "__getitems__", None):
            self._begin(step, 0)
            samples = self.dataset.__getitems__(step.indices)
        else:
            samples = []
            for offset, index in enumerate(step.indices):
                self._begin(step, offset)
                samples.append(self.dataset[index])
        _seed_generators(mix(step.seed, step.start, 1))
        return samples

    def _begin(self, step: Step, offset: int) -> None:
        if self.generation is not None and step.generation < self.generation.value:
            raise StaleStepError
        _seed_generators(mix(step.seed, step.start + offset, 0))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self.generation)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the global generators of `random`, numpy and torch (CPU) as they were found."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
