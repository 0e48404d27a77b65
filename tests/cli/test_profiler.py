"""In what order a profile is measured, and what becomes of what cannot run: with an engine that pretends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from copus_lightning.core.layout import Configuration, Layout, enumerate_layouts
from copus_lightning.engine.failures import OutOfMemory, SwitchFailed
from copus_lightning.engine.profiler import Measured, points, profile_engine

LAYOUTS = enumerate_layouts(4)
FIRST = Layout(pipeline=4)


class PretendedEngine:
    """Notes what it is asked to do, and fails where it is told to."""

    device = torch.device("cpu")

    def __init__(self, memory: int = 10**6, closed: frozenset[Layout] = frozenset()) -> None:
        self.configuration = Configuration(FIRST, 1, 1)
        self.memory, self.closed = memory, closed
        self.visited: list[Layout] = []
        self.steps: list[Configuration] = []
        self.rates: set[float] = set()

    @property
    def layout(self) -> Layout:
        return self.configuration.layout

    @property
    def coordinates(self) -> Any:
        return self.layout.coordinates(0)

    def switch(self, target: Configuration) -> Any:
        changed = target.layout != self.layout
        if changed and target.layout in self.closed:
            raise SwitchFailed(f"rank 1 failed in phase 'build' of the switch to {target}: no room")
        if changed:
            self.visited.append(target.layout)
        self.configuration = target
        return SimpleNamespace(layout_changed=changed, total_seconds=0.5)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        rows, tokens = batch["input_ids"].shape
        assert rows == self.configuration.data_rank_batch_size and tokens == 8
        assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < 11
        in_flight = min(self.configuration.accumulation, self.layout.pipeline)
        if self.configuration.micro_batch_size * in_flight > self.memory:
            raise OutOfMemory("rank 0 ran out of memory")
        self.steps.append(self.configuration)

    def update(self, learning_rate_factor: float) -> None:
        self.rates.add(learning_rate_factor)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def profile(engine: PretendedEngine, **arguments: Any) -> Measured:
    given = {"micro_batch_sizes": [2, 1, 4], "accumulations": [1, 2], "repeats": 3, "warmup_steps": 1}
    return profile_engine(engine, 11, 8, LAYOUTS, **{**given, **arguments})  # type: ignore[arg-type]


def test_every_point_is_measured_with_as_few_switches_as_can_be() -> None:
    engine = PretendedEngine()
    seen: list[tuple[int, int]] = []
    found = profile(engine, progress=lambda configuration, done, total: seen.append((done, total)))
    measured = {(m.layout, m.micro_batch_size, m.accumulation) for m in found.measurements}
    assert measured == {(layout, micro, n) for layout in LAYOUTS for micro in (1, 2, 4) for n in (1, 2)}
    assert len(found.measurements) == len(measured) and not found.infeasible
    assert sorted([FIRST, *engine.visited]) == sorted(LAYOUTS)  # each once, without a switch into the first
    assert found.switch_seconds == 0.5
    n_steps = len(measured) * 4
    assert len(engine.steps) == n_steps and engine.rates == {0.0}
    assert seen == [(done, n_steps) for done in range(n_steps)]
    # Round after round: a point is not measured again before all others of its layout have been.
    assert engine.steps[:6] == engine.steps[6:12] and len(set(engine.steps[:6])) == 6
    assert all(m.step_seconds > 0 and (m.peak_memory_bytes or 0) > 2**20 for m in found.measurements)


def test_points_that_no_run_would_be_in_are_left_out_while_three_remain() -> None:
    def measured(layout: Layout, accumulations: list[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for point in points(layout, [4, 1], accumulations, largest_batch=16):
            found.setdefault(point.micro_batch_size, []).append(point.accumulation)
        return found

    # One replica: one micro-batch per step is none for the noise scale.
    assert measured(FIRST, [1, 2, 4, 8]) == {1: [2, 4, 8], 4: [2, 4, 8]}
    assert measured(FIRST, [2, 1]) == {1: [1, 2], 4: [1, 2]}
    # Beyond a batch of 16 nothing is used, but a fit with an error needs three points.
    assert measured(Layout(data=2, pipeline=2), [1, 2, 4, 8]) == {1: [1, 2, 4, 8], 4: [1, 2, 4]}
    assert measured(Layout(data=4), [1, 2, 3, 4, 5]) == {1: [1, 2, 3, 4], 4: [1, 2, 3]}


def test_what_runs_out_of_memory_is_noted_and_larger_ones_are_not_tried() -> None:
    engine = PretendedEngine(memory=3)
    found = profile(engine)
    refused = {(i.layout, i.micro_batch_size): i.reason for i in found.infeasible}
    # A pipeline has more micro-batches in flight, so there already 2 is too much once two of them accumulate.
    assert set(refused) == {(la, m) for la in LAYOUTS for m in (2, 4) if m == 4 or la.pipeline > 1}
    assert refused[FIRST, 2] == "rank 0 ran out of memory"
    assert refused[FIRST, 4] == "larger than micro-batch 2, which ran out of memory"
    assert not {(m.layout, m.micro_batch_size) for m in found.measurements} & set(refused)
    assert len(found.measurements) == 2 * (3 * len(LAYOUTS) - len(refused))
    assert not [c for c in engine.steps if c.layout == FIRST and c.micro_batch_size == 4]


def test_a_layout_that_cannot_be_entered_does_not_end_the_profile() -> None:
    closed = Layout(data=4)
    found = profile(PretendedEngine(closed=frozenset({closed})))
    assert {i.layout for i in found.infeasible} == {closed} and len(found.infeasible) == 3
    assert all("phase 'build'" in entry.reason for entry in found.infeasible)
    assert {m.layout for m in found.measurements} == set(LAYOUTS) - {closed}
