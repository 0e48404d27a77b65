"""The global order of samples, and each data rank's share of every optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_MASK_64 = (1 << 64) - 1
_ROUNDS = 8


def mix(*values: int) -> int:
    """Hash integers into 64 bits (the finaliser of splitmix64, Steele et al. 2014, chained).

    Args:
        values: Any integers; only their low 64 bits count.
    """
    state = 0
    for value in values:
        state = ((state ^ value) + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


def permute(values: np.ndarray, n: int, key: int) -> np.ndarray:
    """A keyed bijection of ``[0, n)``, in memory that does not depend on ``n``.

    An alternating Feistel network permutes the smallest power of two that holds ``n`` (Luby and Rackoff
    1988); what lands outside ``[0, n)`` is permuted again until it is inside ("cycle walking", Black and
    Rogaway 2002), which keeps the map a bijection. The power of two is below ``2 n``, so two passes are
    enough on average.

    Args:
        values: Shape ``[k]``, integers in ``[0, n)``.
        n: Size of the domain, 1 to 2**62.
        key: Chooses the permutation.

    Returns:
        Shape ``[k]``, int64, in ``[0, n)``.
    """
    n_bits = (n - 1).bit_length()
    low_bits = np.uint64(n_bits - n_bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = np.uint64((1 << (n_bits // 2)) - 1)
    keys = np.array([mix(key, k) for k in range(_ROUNDS)], dtype=np.uint64)

    result = values.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        walking = result[outside]
        low, high = walking & low_mask, walking >> low_bits
        for k in range(_ROUNDS):
            hashed = ((high if k % 2 else low) + keys[k]) * np.uint64(0xBF58476D1CE4E5B9)
            hashed ^= hashed >> np.uint64(32)
            hashed *= np.uint64(0x94D049BB133111EB)
            hashed ^= hashed >> np.uint64(29)
            if k % 2:
                low ^= hashed & low_mask
            else:
                high ^= hashed & high_mask
        result[outside] = (high << low_bits) | low
        outside[outside] = result[outside] >= n
    return result.astype(np.int64)


class GlobalOrder:
    """Which sample of the dataset stands at each global position of the run.

    Position ``i`` is in epoch ``i // n_samples``; each epoch is a permutation of the dataset that depends on
    the seed and the epoch alone, so no rank, layout, batch size or history has a say in it. Nothing of the
    size of the dataset is allocated.

    Args:
        n_samples: Length of the dataset, at least 1.
        seed: Chooses the permutations.
        shuffle: Whether epochs are permuted at all; otherwise each is ``0 … n_samples - 1``.
    """

    def __init__(self, n_samples: int, seed: int, shuffle: bool = True) -> None:
        if n_samples < 1:
            raise ValueError("data: the dataset is empty; give one with at least one sample")
        self.n_samples = n_samples
        self.seed = seed
        self.shuffle = shuffle

    def index(self, position: int) -> int:
        """Dataset index of the sample at one global position (>= 0)."""
        return int(self.indices(position, position + 1)[0])

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Dataset indices at the global positions ``[start, stop)``: shape ``[stop - start]``, int64."""
        assert 0 <= start <= stop, f"positions [{start}, {stop}) are not a range"
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.n_samples)
            within = np.arange(first, min(first + stop - start, self.n_samples), dtype=np.int64)
            parts.append(permute(within, self.n_samples, mix(self.seed, epoch)) if self.shuffle else within)
            start += len(within)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class ElasticBatchSampler:
    """For one data rank: the dataset indices of each optimizer step, from a global position onwards.

    A step takes the next ``global_batch_size`` positions; data rank ``r`` of ``data_size`` takes the ``r``-th
    of ``data_size`` equal contiguous shares. Tensor and pipeline peers have the same data rank and so the
    same samples.

    Iterating is endless, starts at ``position`` and does not move it: whoever uses a step adds its global
    batch, so that what was drawn ahead of use can be drawn again.

    Attributes:
        position: Global samples consumed so far, over all data ranks.

    Args:
        order: The order that all ranks share.
        data_rank: This rank's index on the data axis, ``0 … data_size - 1``.
        data_size: Number of data ranks.
        global_batch_size: Samples per optimizer step over all data ranks; a multiple of ``data_size``.
        position: Where to begin.

    Raises:
        ValueError: If the rank is not on the axis, or the batch does not divide.
    """

    def __init__(
        self, order: GlobalOrder, data_rank: int, data_size: int, global_batch_size: int, position: int = 0
    ) -> None:
        self.order = order
        self.position = position
        self._configuration = self._checked(data_rank, data_size, global_batch_size)

    @property
    def data_rank(self) -> int:
        return self._configuration[0]

    @property
    def data_size(self) -> int:
        return self._configuration[1]

    @property
    def global_batch_size(self) -> int:
        return self._configuration[2]

    @property
    def data_rank_batch_size(self) -> int:
        """Samples per optimizer step on this data rank."""
        return self.global_batch_size // self.data_size

    def reconfigure(
        self,
        *,
        data_rank: int | None = None,
        data_size: int | None = None,
        global_batch_size: int | None = None,
    ) -> bool:
        """Change what is given and keep the rest; all or nothing.

        Iterators already made keep the configuration they began with.

        Returns:
            Whether anything changed.

        Raises:
            ValueError: If the result is not valid; nothing is changed then.
        """
        before = self._configuration
        self._configuration = self._checked(
            self.data_rank if data_rank is None else data_rank,
            self.data_size if data_size is None else data_size,
            self.global_batch_size if global_batch_size is None else global_batch_size,
        )
        return self._configuration != before

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Endlessly: the global position of this rank's first sample of a step, and the dataset indices."""
        data_rank, data_size, global_batch_size = self._configuration
        share = global_batch_size // data_size
        start = self.position + data_rank * share
        while True:
            yield start, self.order.indices(start, start + share).tolist()
            start += global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (indices for _, indices in self.steps())

    @staticmethod
    def _checked(data_rank: int, data_size: int, global_batch_size: int) -> tuple[int, int, int]:
        if data_size < 1 or not 0 <= data_rank < data_size:
            raise ValueError(
                f"data_rank={data_rank} is not one of the {data_size} data ranks; give 0 … data_size - 1"
            )
        if global_batch_size < 1 or global_batch_size % data_size:
            below = global_batch_size // data_size * data_size
            nearest = f"{below} or {below + data_size}" if below > 0 else f"{data_size}"
            raise ValueError(
                f"global_batch_size={global_batch_size} does not divide over {data_size} data ranks; "
                f"use {nearest}"
            )
        return data_rank, data_size, global_batch_size
