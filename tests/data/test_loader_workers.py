from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from copus_lightning.data.loader import ElasticDataLoader

Children = Callable[[], set[int]]


class Slow(Dataset):
    """Items say who made them; each takes `seconds`."""

    def __init__(self, n: int, seconds: float = 0.0, fails_at: int = -1) -> None:
        self.n = n
        self.seconds = seconds
        self.fails_at = fails_at
        self.opened_by = -1

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.fails_at:
            raise KeyError("no such document")
        time.sleep(self.seconds)
        info = get_worker_info()
        return {"id": index, "worker": info.id if info else -1, "opened_by": self.opened_by}


class Stuck(Slow):
    """Hangs in the second batch of four."""

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == 5:
            time.sleep(30)
        return super().__getitem__(index)


class Counted(Slow):
    """Counts how often each item is fetched; from ``closed_from`` on they wait for the gate to open."""

    def __init__(self, n: int, closed_from: int) -> None:
        super().__init__(n)
        self.closed_from = closed_from
        self.counts = torch.zeros(n, dtype=torch.int64).share_memory_()
        self.gate = torch.multiprocessing.Event()

    def __getitem__(self, index: int) -> dict[str, int]:
        if index >= self.closed_from:
            assert self.gate.wait(30)
        self.counts[index] += 1
        return super().__getitem__(index)


def open_files(worker_id: int, offset: int) -> None:
    get_worker_info().dataset.opened_by = worker_id + offset


def elastic(dataset: Slow, batch: int = 4, **kwargs: Any) -> ElasticDataLoader:
    return ElasticDataLoader(DataLoader(dataset, num_workers=2, **kwargs), 0, 1, batch, 0)


def test_worker_settings_are_respected() -> None:
    loader = elastic(
        Slow(64),
        worker_init_fn=partial(open_files, offset=10),
        multiprocessing_context="fork",
        prefetch_factor=3,
        generator=torch.Generator(),
        timeout=60,
    )
    batches = list(loader)
    assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(64))
    workers = torch.cat([batch["worker"] for batch in batches])
    assert set(workers.tolist()) == {0, 1}
    assert torch.equal(torch.cat([batch["opened_by"] for batch in batches]), workers + 10)


def test_reconfiguring_keeps_the_processes(children: Children) -> None:
    before = children()
    loader = elastic(Slow(400), persistent_workers=True)
    seen = []
    iterator = iter(loader)
    seen += next(iterator)["id"].tolist()
    workers = children() - before
    assert len(workers) == 2
    for batch in (8, 2, 6):
        loader.reconfigure(global_batch_size=batch)
        seen += next(iterator)["id"].tolist()
    seen += [index for batch in iterator for index in batch["id"].tolist()]
    assert children() - before == workers, "the user asked for workers that outlive the epoch"
    seen += next(iter(loader))["id"].tolist()
    assert children() - before == workers
    assert seen == [index % 400 for index in range(len(seen))]
    loader.close()
    loader.close()
    assert children() == before


@pytest.mark.parametrize("leave", ["end", "break", "error", "drop"])
def test_workers_end_with_the_iteration(leave: str, children: Children) -> None:
    before = children()
    loader = elastic(Slow(40), persistent_workers=leave == "drop")
    try:
        for _ in loader:
            assert len(children() - before) == 2
            if leave in ("break", "drop"):
                break
            if leave == "error":
                raise RuntimeError
    except RuntimeError:
        pass
    if leave == "drop":
        assert len(children() - before) == 2
        del loader
    assert children() == before


def test_stale_work_is_given_up_at_the_next_sample() -> None:
    dataset = Counted(10_000, closed_from=64)
    loader = elastic(dataset, batch=64)
    iterator = iter(loader)
    next(iterator)
    loader.reconfigure(global_batch_size=2)
    dataset.gate.set()
    assert next(iterator)["id"].tolist() == [64, 65]
    loader.close()
    # One worker may have waited at 128; the rest of what was fetched ahead, up to 319, is left alone.
    assert dataset.counts[80:].sum() <= 1


def test_an_unchanged_configuration_keeps_what_was_fetched() -> None:
    dataset = Counted(1000, closed_from=1000)
    loader = elastic(dataset, batch=8)
    iterator = iter(loader)
    next(iterator)
    deadline = time.monotonic() + 30
    while dataset.counts[15] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    loader.reconfigure(data_rank=0, data_size=1, global_batch_size=8)
    assert next(iterator)["id"].tolist() == list(range(8, 16))
    assert dataset.counts[8:16].tolist() == [1] * 8
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_sample_consumes_nothing(num_workers: int, children: Children) -> None:
    before = children()
    dataset = Slow(40, fails_at=9)
    loader = ElasticDataLoader(DataLoader(dataset, num_workers=num_workers), 0, 1, 4, 0)
    seen = []
    with pytest.raises(KeyError, match="no such document"):
        for batch in loader:
            seen += batch["id"].tolist()
    assert loader.position == len(seen) == 8
    assert children() == before
    dataset.fails_at = -1
    assert next(iter(loader))["id"].tolist() == [8, 9, 10, 11]


def test_a_killed_worker_is_an_error_and_leaves_the_position(children: Children) -> None:
    before = children()
    loader = elastic(Slow(1000, seconds=0.001))
    iterator = iter(loader)
    next(iterator)
    psutil.Process(min(children() - before)).kill()
    # By when it dies, torch notices or the batch under way breaks off.
    with pytest.raises((RuntimeError, OSError, EOFError)):
        for _ in range(100):
            next(iterator)
    position = loader.position
    assert children() == before
    assert next(iter(loader))["id"][0] == position


def test_a_worker_outlives_one_sigterm_and_not_two(children: Children) -> None:
    before = children()
    loader = elastic(Slow(1000, seconds=0.001), worker_init_fn=partial(open_files, offset=10))
    iterator = iter(loader)
    assert next(iterator)["opened_by"].min() >= 10
    workers = children() - before
    worker = psutil.Process(min(workers))
    worker.terminate()
    for _ in range(40):  # more than was fetched before
        next(iterator)
    assert children() - before == workers, "a signal to all processes is the training process's to answer"
    worker.terminate()
    with pytest.raises((RuntimeError, OSError, EOFError)):
        for _ in range(100):
            next(iterator)
    assert children() == before


def test_a_worker_that_hangs_ends_with_the_loader(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    before = children()
    loader = elastic(Stuck(1000))
    next(iter(loader))
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # torch waits for 5 s
    loader.close()
    deadline = time.monotonic() + 20  # the item takes 30 s
    while children() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children() == before


def test_iterations_may_take_turns() -> None:
    loader = elastic(Slow(40))
    left_standing = iter(loader)
    assert next(left_standing)["id"][0] == 0
    current = iter(loader)
    assert next(current)["id"][0] == 4
    left_standing.close()
    assert [batch["id"][0].item() for batch in current] == list(range(8, 40, 4))


def test_no_descriptors_or_threads_leak_over_reconfigurations() -> None:
    loader = elastic(Slow(100_000), persistent_workers=True)
    process = psutil.Process()

    def reconfigure(times: int) -> None:
        iterator = iter(loader)
        for step in range(times):
            loader.reconfigure(global_batch_size=2 + step % 2)
            next(iterator)
        # Batches in flight have descriptors of their own, so count when there are none.
        loader.close()

    reconfigure(times=5)
    n_fds, n_threads = process.num_fds(), process.num_threads()
    for _ in range(3):
        reconfigure(times=40)
    # What serves the last batch's descriptors may still be ending.
    deadline = time.monotonic() + 10
    while (process.num_fds() > n_fds or process.num_threads() > n_threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert process.num_fds() <= n_fds and process.num_threads() <= n_threads
