from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from copus_lightning.data.loader import ElasticDataLoader
from copus_lightning.data.sampler import GlobalOrder


class Ids(Dataset):
    """Item i is the number i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Noisy(Ids):
    """Item i draws from all three global generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64
        )


def noisy_collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack(samples), torch.rand(())


def elastic(
    dataset: Any, *, data_rank: int = 0, data_size: int = 1, batch: int = 4, seed: int = 5, **kwargs: Any
) -> ElasticDataLoader:
    return ElasticDataLoader(DataLoader(dataset, batch_size=3, **kwargs), data_rank, data_size, batch, seed)


@pytest.mark.parametrize(("num_workers", "persistent_workers"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ten_reconfigurations_use_every_sample_once_in_order(
    num_workers: int, persistent_workers: bool, shuffle: bool
) -> None:
    """Three ranks over two epochs; data size and global batch change at random, also at the epoch's end."""
    n, world_size = 53, 3
    chooser = random.Random(num_workers)
    loaders = [
        elastic(Ids(n), num_workers=num_workers, persistent_workers=persistent_workers, shuffle=shuffle)
        for _ in range(world_size)
    ]
    seen: list[int] = []
    n_reconfigurations, data_size = 0, 1
    iterators = [iter(loader) for loader in loaders]
    while len(seen) < 2 * n:
        if len(seen) >= 8 * n_reconfigurations and n_reconfigurations < 10:
            data_size = chooser.choice([1, 2, 3])
            batch = data_size * chooser.randint(1, 5)
            for rank, loader in enumerate(loaders):
                loader.reconfigure(data_rank=rank % data_size, data_size=data_size, global_batch_size=batch)
            n_reconfigurations += 1
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert all(batch is None for batch in batches)
            iterators = [iter(loader) for loader in loaders]
            continue
        for rank, share in enumerate(batches):
            assert torch.equal(share, batches[rank % data_size]), (
                "peers of one data index see the same samples"
            )
        seen += torch.cat(batches[:data_size]).tolist()
        assert {loader.position for loader in loaders} == {len(seen)}
    assert n_reconfigurations == 10
    assert sorted(seen[:n]) == sorted(seen[n : 2 * n]) == list(range(n))
    assert seen == GlobalOrder(n, 5, shuffle).indices(0, len(seen)).tolist()
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_ends_and_carries_its_remainder(num_workers: int) -> None:
    loader = elastic(Ids(10), batch=4, num_workers=num_workers, shuffle=False)
    lengths, epochs = [], []
    for _ in range(4):
        lengths.append(len(loader))
        epochs.append([batch.tolist() for batch in loader])
    assert epochs == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]],
    ]
    assert lengths == [2, 3, 2, 3]


def test_global_batch_larger_than_the_dataset() -> None:
    loader = elastic(Ids(3), batch=7, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 0, 1, 2, 0]]
    assert [batch.tolist() for batch in loader] == [[1, 2, 0, 1, 2, 0, 1]]


def test_growing_past_the_end_ends_the_iteration_and_loses_nothing() -> None:
    loader = elastic(Ids(10), batch=4, shuffle=False)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        loader.reconfigure(global_batch_size=8)
    assert seen == [0, 1, 2, 3]
    assert next(iter(loader)).tolist() == [4, 5, 6, 7, 8, 9, 0, 1]


def test_length_counts_the_iteration_under_way() -> None:
    loader = elastic(Ids(20), batch=4)
    iterator = iter(loader)
    assert len(loader) == 5
    next(iterator), next(iterator)
    assert len(loader) == 5
    loader.reconfigure(global_batch_size=2)
    assert len(loader) == 2 + 6
    assert len(list(iterator)) == 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_is_exact_under_another_split(num_workers: int) -> None:
    whole = torch.cat(list(elastic(Ids(48), batch=4, shuffle=True))).tolist()
    first = elastic(Ids(48), batch=6, num_workers=num_workers, shuffle=True)
    seen: list[int] = []
    for batch in first:
        seen += batch.tolist()
        if len(seen) == 18:
            break
    state = first.state_dict()
    assert state == {"position": 18, "seed": 5, "shuffle": True, "n_samples": 48}
    ranks = [
        elastic(Ids(48), data_rank=r, data_size=2, batch=10, seed=99, num_workers=num_workers, shuffle=True)
        for r in range(2)
    ]
    for loader in ranks:
        loader.load_state_dict(state)
    for batches in zip(*ranks, strict=True):
        seen += torch.cat(batches).tolist()
    assert seen == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_going_back_in_the_middle_repeats_the_same_samples(num_workers: int) -> None:
    loader = elastic(Noisy(30), batch=4, num_workers=num_workers, shuffle=True, collate_fn=noisy_collate)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = [next(iterator) for _ in range(3)]
    loader.load_state_dict(state)
    again = [next(iterator) for _ in range(3)]
    for (samples, draw), (samples_again, draw_again) in zip(before, again, strict=True):
        assert torch.equal(samples, samples_again) and torch.equal(draw, draw_again)
    assert len(list(iterator)) == 30 // 4 - 4
    loader.load_state_dict({**state, "position": 68})
    assert len(list(loader)) == (90 - 68) // 4


def test_random_samples_depend_on_position_alone() -> None:
    """One process or workers, one data rank or two: each position's sample has the same random numbers."""
    reference = torch.cat(list(elastic(Noisy(24), batch=4, shuffle=True)))
    assert len(reference[:, 1:].unique()) == 3 * 24
    parts = []
    ranks = [
        elastic(Noisy(24), data_rank=r, data_size=2, batch=8, num_workers=r, shuffle=True) for r in (0, 1)
    ]
    for shares in zip(*ranks, strict=True):
        parts += shares
    assert torch.equal(torch.cat(parts), reference)
    second_epoch = elastic(Noisy(24), batch=4, shuffle=True)
    second_epoch.load_state_dict({**second_epoch.state_dict(), "position": 24})
    assert not set(torch.cat(list(second_epoch))[:, 1].tolist()) & set(reference[:, 1].tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_training_generators_alone(num_workers: int) -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    loader = elastic(Noisy(30), num_workers=num_workers, collate_fn=noisy_collate, shuffle=True)
    for batch_number, _ in enumerate(loader):
        if batch_number == 2:
            loader.reconfigure(global_batch_size=2)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_a_dataset_that_fetches_many_at_once_is_asked_once() -> None:
    calls = []

    class Many(Ids):
        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(indices)
            return indices

    assert [batch.tolist() for batch in elastic(Many(8), batch=4, shuffle=False)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(iter(elastic(Subset(Ids(8), [7, 6, 5]), batch=3, shuffle=False))).tolist() == [7, 6, 5]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return iter(())


class NoLength(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: [1, 2], "not a torch DataLoader; wrap"),
        (lambda: DataLoader(Stream()), "IterableDataset.*use a map-style dataset"),
        (lambda: DataLoader(NoLength()), "define __len__"),
        (lambda: OwnLoader(Ids(4)), "OwnLoader iterates in its own way.*use a plain DataLoader"),
        (lambda: DataLoader(Ids(4), batch_size=None), "batch_size=None turns batching off; give any number"),
        (lambda: DataLoader(Ids(4), batch_sampler=[[0, 1]]), "batch_sampler=list.*pass shuffle=True"),
        (
            lambda: DataLoader(Ids(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
            "sampler=WeightedRandomSampler.*pass shuffle=True",
        ),
        (
            lambda: DataLoader(Ids(4), sampler=DistributedSampler(Ids(4), num_replicas=2, rank=0)),
            "sampler=DistributedSampler.*sharding over ranks is done here",
        ),
        (
            lambda: DataLoader(Ids(4), sampler=RandomSampler(Ids(4), replacement=True)),
            "sampler=RandomSampler",
        ),
        (lambda: DataLoader(Ids(4), sampler=RandomSampler(Ids(4), num_samples=2)), "sampler=RandomSampler"),
        (lambda: DataLoader(Ids(0)), "dataset is empty"),
    ],
)
def test_what_cannot_be_sampled_by_position_is_refused_in_one_line(make: Any, names: str) -> None:
    with pytest.raises(ValueError, match=names) as error:
        ElasticDataLoader(make(), 0, 1, 4, 0)
    assert "\n" not in str(error.value)


def test_plain_samplers_given_by_hand_are_understood() -> None:
    by_hand = DataLoader(Ids(9), batch_sampler=BatchSampler(SequentialSampler(Ids(9)), 2, True))
    assert torch.cat(list(ElasticDataLoader(by_hand, 0, 1, 3, 0))).tolist() == list(range(9))
    shuffled = ElasticDataLoader(DataLoader(Ids(9), sampler=RandomSampler(Ids(9))), 0, 1, 3, 0)
    assert shuffled.state_dict()["shuffle"] is True


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"n_samples": 31}, "`n_samples` is 31 in the checkpoint and 30"),
        ({"shuffle": False}, "`shuffle` is False"),
    ],
)
def test_foreign_state_is_refused(change: dict[str, Any], names: str) -> None:
    loader = elastic(Ids(30), shuffle=True)
    with pytest.raises(ValueError, match=names):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(ValueError, match="`position` is missing"):
        loader.load_state_dict({})
    assert loader.position == 0
