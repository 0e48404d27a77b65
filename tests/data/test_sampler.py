from __future__ import annotations

import random

import numpy as np
import pytest

from copus_lightning.data.sampler import ElasticBatchSampler, GlobalOrder, mix, permute


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1009, 4096, 4097, 10007, 65537])
def test_permutation_is_a_bijection(n: int) -> None:
    for key in (0, 1, mix(3, 4)):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permutation_does_not_depend_on_how_it_is_asked() -> None:
    whole = permute(np.arange(1000), 1000, 5)
    assert [int(permute(np.array([i]), 1000, 5)[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


def test_permutation_is_fixed_for_all_time() -> None:
    # A resume under another release must see the same order.
    assert permute(np.arange(10), 10, 0).tolist() == [0, 2, 7, 3, 6, 1, 4, 5, 8, 9]
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from state 0


def test_permutation_looks_shuffled() -> None:
    n = 50_000
    first, second = (permute(np.arange(n), n, key).astype(float) for key in (1, 2))
    for a, b in ((first, np.arange(n)), (first[1:], first[:-1]), (first, second)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)
    # Every order of three comes up about equally often.
    counts: dict[tuple[int, ...], int] = {}
    for key in range(3000):
        order = tuple(permute(np.arange(3), 3, mix(key)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert max(abs(count - 500) for count in counts.values()) < 5 * np.sqrt(500)


def test_the_order_of_a_huge_dataset_is_never_laid_out() -> None:
    order = GlobalOrder(10**15, seed=0)
    indices = order.indices(7 * 10**14, 7 * 10**14 + 100_000)
    assert len(np.unique(indices)) == 100_000 and indices.min() >= 0 and indices.max() < 10**15


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_each_epoch_is_a_permutation_of_its_own(n: int) -> None:
    order = GlobalOrder(n, seed=11)
    epochs = order.indices(0, 3 * n).reshape(3, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs.tolist())
    if n == 100:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
        assert order.indices(0, n).tolist() != GlobalOrder(n, seed=12).indices(0, n).tolist()
    assert [order.index(i) for i in range(2 * n)] == epochs[:2].ravel().tolist()
    assert order.indices(n // 2, n // 2).tolist() == []


def test_unshuffled_order_is_the_datasets_own() -> None:
    assert GlobalOrder(3, seed=1, shuffle=False).indices(1, 8).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        GlobalOrder(0, seed=0)


def test_shares_are_contiguous_and_cover_the_global_batch() -> None:
    order = GlobalOrder(10, seed=0)
    for data_size in (1, 2, 3, 6):
        samplers = [ElasticBatchSampler(order, rank, data_size, 6, position=4) for rank in range(data_size)]
        for step, shares in zip(range(5), zip(*samplers, strict=True), strict=False):
            assert {len(share) for share in shares} == {6 // data_size}
            assert np.concatenate(shares).tolist() == order.indices(4 + 6 * step, 10 + 6 * step).tolist()


def test_random_reconfigurations_use_each_position_once() -> None:
    chooser = random.Random(0)
    order = GlobalOrder(101, seed=3)
    sampler, seen = ElasticBatchSampler(order, 0, 1, 4), []
    for _ in range(50):
        data_size = chooser.choice([1, 2, 4])
        global_batch_size = data_size * chooser.randint(1, 8)
        for rank in range(data_size):
            sampler.reconfigure(data_rank=rank, data_size=data_size, global_batch_size=global_batch_size)
            seen += next(iter(sampler))
        sampler.position += global_batch_size
    assert seen == order.indices(0, sampler.position).tolist()


def test_a_running_iterator_keeps_its_configuration() -> None:
    sampler = ElasticBatchSampler(GlobalOrder(100, seed=0, shuffle=False), 0, 1, 2)
    running = iter(sampler)
    assert next(running) == [0, 1]
    assert sampler.reconfigure(global_batch_size=3)
    assert not sampler.reconfigure(global_batch_size=3)
    assert next(running) == [2, 3]
    assert next(iter(sampler)) == [0, 1, 2]


def test_bad_shares_are_refused_and_change_nothing() -> None:
    sampler = ElasticBatchSampler(GlobalOrder(100, seed=0), 1, 2, 4)
    with pytest.raises(
        ValueError, match=r"global_batch_size=7 does not divide over 2 data ranks; use 6 or 8$"
    ):
        sampler.reconfigure(global_batch_size=7)
    with pytest.raises(ValueError, match=r"global_batch_size=1 does not divide over 2 data ranks; use 2$"):
        sampler.reconfigure(global_batch_size=1)
    with pytest.raises(ValueError, match="data_rank=1 is not one of the 1 data ranks"):
        sampler.reconfigure(data_size=1)
    assert (sampler.data_rank, sampler.data_size, sampler.global_batch_size) == (1, 2, 4)
    assert sampler.data_rank_batch_size == 2
