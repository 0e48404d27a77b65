"""The norms that a step is measured by, against per-micro-batch gradients of one process."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from world import World

from copus_lightning.core.layout import Layout
from copus_lightning.core.noise import StepNorms, estimate

from . import tiny
from .tiny import LAYOUTS, N_SAMPLES, TIED, UNTIED, Tiny


def direct(model: Tiny, kind: str, micro_batch_size: int) -> StepNorms:
    """The definition: a backward pass for each micro-batch alone, and one for the global batch."""
    micro = [
        tiny.reference(model, kind, start, start + micro_batch_size)
        for start in range(0, N_SAMPLES, micro_batch_size)
    ]
    whole = tiny.reference(model, kind)
    return StepNorms(
        weighted_micro_sq_norm_sum=sum(one.n_targets * one.norm**2 for one in micro),
        mean_sq_norm=whole.norm**2,
        n_micro_batches=sum(one.n_targets > 0 for one in micro),
        n_target_tokens=whole.n_targets,
        n_samples=N_SAMPLES,
    )


def measure(
    model: Tiny, kind: str, settings: dict[str, Any], layouts: list[Layout], micro_batch_size: int
) -> tuple[StepNorms, list[StepNorms | None]]:
    found = []
    for layout in layouts:
        with tiny.running(layout, model, micro_batch_size=micro_batch_size, **settings) as engine:
            engine.measure_next = True
            engine.step(tiny.share(engine, tiny.make_batch(kind)))
            found.append(engine.update().norms)
            assert not engine.measure_next, "it is a wish for one step"
    return direct(model, kind, micro_batch_size), found


CASES = [
    ("plain", TIED, {"zero_stage": 0}),
    ("plain", UNTIED, {"zero_stage": 1}),
    ("uneven", TIED, {"zero_stage": 1, "gradient_clip_norm": 0.1}),
    ("uneven", Tiny(family="qwen3", options=(("head_dim", 8),)), {"zero_stage": 1}),
]


@pytest.mark.parametrize(
    ("kind", "model", "settings"),
    CASES,
    ids=["equal-tied", "equal-untied", "unequal-tied", "summed-gradients"],
)
def test_norms_are_those_of_the_definition_under_every_layout(
    world: World, kind: str, model: Tiny, settings: dict[str, Any]
) -> None:
    layouts = LAYOUTS[4] if kind == "uneven" else LAYOUTS[4][:-1]
    by_rank = world.run(measure, model, kind, settings, layouts, 2)
    expected, first = by_rank[0]
    assert expected.n_micro_batches == (3 if kind == "uneven" else 4), "a micro-batch without targets"
    for _, found in by_rank:
        assert found == first, "all ranks hear the same"
    for layout, norms in zip(layouts, first, strict=True):
        assert astuple(norms) == pytest.approx(astuple(expected), rel=1e-5), str(layout)
        assert estimate(norms).trace == pytest.approx(estimate(expected).trace, rel=1e-4), str(layout)


def test_micro_batches_of_one_sample_and_bf16(world: World) -> None:
    layouts = [Layout(data=4), Layout(data=2, pipeline=2), Layout(pipeline=4)]
    expected, found = world.run(measure, TIED, "uneven", {}, layouts, 1)[0]
    for norms in found:
        assert astuple(norms) == pytest.approx(astuple(expected), rel=1e-5)
    expected, found = world.run(measure, TIED, "uneven", {"dtype": torch.bfloat16}, LAYOUTS[4][:-1], 2)[0]
    for norms in found:
        assert astuple(norms) == pytest.approx(astuple(expected), rel=0.05)


def curves(layout: Layout, model: Tiny, settings: dict[str, Any], measured: list[bool]) -> Any:
    with tiny.running(layout, model, micro_batch_size=2, **settings) as engine:
        norms = []
        for seed, wish in enumerate(measured):
            engine.measure_next = wish
            engine.step(tiny.share(engine, tiny.make_batch("uneven", seed)))
            norms.append(engine.update().norms)
        return tiny.state(engine), norms


def measured_and_not(cases: list[tuple[Layout, Tiny, dict[str, Any]]]) -> list[tuple[list[str], Any]]:
    found = []
    for case in cases:
        measured, norms = curves(*case, [True, False, True])
        unmeasured, none = curves(*case, [False, False, False])
        found.append((tiny.differences(measured, unmeasured), (norms, none)))
    return found


def test_measuring_changes_no_bit_of_the_state(world: World) -> None:
    cases: list[tuple[Layout, Tiny, dict[str, Any]]] = [
        (Layout(data=4), UNTIED, {"zero_stage": 0, "gradient_clip_norm": 0.1}),
        (Layout(data=2, pipeline=2), TIED, {"zero_stage": 1, "dtype": torch.bfloat16}),
        (Layout(data=2, tensor=2), TIED, {"zero_stage": 1}),
        (Layout(tensor=2, pipeline=2), TIED, {"zero_stage": 0}),
    ]
    for found in world.run(measured_and_not, cases):
        for (layout, *_), (different, (norms, none)) in zip(cases, found, strict=True):
            assert different == [], str(layout)
            assert [n is not None for n in norms] == [True, False, True] and none == [None] * 3
            assert all(math.isfinite(n.weighted_micro_sq_norm_sum) for n in norms if n is not None)
