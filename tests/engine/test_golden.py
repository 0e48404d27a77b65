"""Loss, gradients, norm, clipping and update under every layout, against autograd in one process."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from world import World

from copus_lightning.core.layout import Layout

from . import tiny
from .tiny import LAYOUTS, TIED, UNTIED, Tiny

CLIP = 0.25
"""Relative to the norm of a batch's gradient."""


class Found(NamedTuple):
    """What one rank saw of one step; errors are relative to one process, but for the update's."""

    layout: str
    accumulation: int
    loss_error: float
    gradient_error: float
    worst_parameter: str
    norm_error: float
    clip_error: float
    clip_coefficient: float
    update_error: float


def golden(model: Tiny, kind: str, zero_stage: int, dtype: torch.dtype, layouts: list[Layout]) -> list[Found]:
    """One step with accumulation 1 and one with 4, both from the initial weights."""
    expected = tiny.reference(model, kind)
    clip = CLIP * expected.norm
    batch = tiny.make_batch(kind, vocab_size=model.vocab_size)
    found = []
    for layout in layouts:
        configurations = [tiny.accumulating(layout, accumulation) for accumulation in (1, 4)]
        whole = model.build()
        sgd = torch.optim.SGD(whole.parameters(), lr=0.0)
        settings = {"zero_stage": zero_stage, "dtype": dtype, "gradient_clip_norm": clip}
        first = configurations[0]
        with tiny.running(
            layout, model=whole, optimizer=sgd, micro_batch_size=first.micro_batch_size, **settings
        ) as engine:
            for configuration, rate in zip(configurations, (0.0, 1.0), strict=True):
                engine.switch(configuration)
                sgd.param_groups[0]["lr"] = rate
                before = tiny.gathered(engine)
                loss = engine.step(tiny.share(engine, tiny.repeated(batch, configuration))).item()
                gradients = tiny.gathered(engine, "gradient")
                outcome = engine.update()
                after = tiny.gathered(engine)
                step = rate * outcome.clip_coefficient
                found.append(
                    Found(
                        str(layout),
                        configuration.accumulation,
                        abs(loss / expected.loss - 1),
                        *tiny.worst(gradients, expected.gradients),
                        abs(outcome.gradient_norm / expected.norm - 1),
                        abs(outcome.clip_coefficient / CLIP - 1),
                        outcome.clip_coefficient,
                        max((before[n] - step * gradients[n] - after[n]).abs().max().item() for n in before),
                    )
                )
    return found


def check(by_rank: list[list[Found]], tolerance: float) -> None:
    for steps in zip(*by_rank, strict=True):
        for found in steps:
            assert found.loss_error < tolerance, found
            assert found.gradient_error < tolerance, found
            assert found.norm_error < tolerance, found
            assert found.clip_error < 2 * tolerance, found  # the norm counts with torch's 1e-6 on top
            assert found.update_error < 1e-6, found
        assert len({found.clip_coefficient for found in steps}) == 1, steps


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("model", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_unequal_targets_and_uneven_shards(world: World, ranks: int, model: Tiny, zero_stage: int) -> None:
    layouts = LAYOUTS[ranks]
    check(
        world.run(golden, model, "uneven", zero_stage, torch.float32, layouts, ranks=ranks, timeout=120),
        tolerance=1e-5,
    )


@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_grouped_query_attention_and_attention_masks(world: World, kind: str) -> None:
    model = Tiny(vocab_size=96, n_kv_heads=2)
    layouts = [layout for layout in LAYOUTS[4] if layout.tensor <= 2]
    check(world.run(golden, model, kind, 1, torch.float32, layouts), tolerance=1e-5)


HEADS, WINDOW = ("head_dim", 8), ("sliding_window", 6)
FAMILIES = [
    Tiny(family="qwen2"),  # biases
    Tiny(family="qwen3", options=(HEADS,)),  # norms of queries and keys
    Tiny(family="qwen3", options=(HEADS,), tied=True),
    Tiny(family="mistral", options=(HEADS, WINDOW)),
    Tiny(
        family="gemma2", options=(HEADS, WINDOW), tied=True, attention="eager"
    ),  # scaled embeddings, capped logits
    Tiny(family="gemma3_text", options=(HEADS, WINDOW), tied=True),
    Tiny(family="cohere", tied=True),  # scaled logits
    Tiny(family="granite", options=(("logits_scaling", 8.0), ("residual_multiplier", 0.22))),
    Tiny(family="phi"),
    Tiny(family="gpt_neox"),
    Tiny(family="starcoder2", options=(("residual_dropout", 0.0), ("embedding_dropout", 0.0))),
]


@pytest.mark.parametrize("model", FAMILIES, ids=lambda m: m.family)
def test_families(world: World, model: Tiny) -> None:
    layouts = [Layout(data=2, tensor=2), Layout(tensor=2, pipeline=2), Layout(pipeline=4)]
    check(world.run(golden, model, "padded", 1, torch.float32, layouts), tolerance=1e-5)


def test_bf16_gradients_are_accumulated_in_fp32(world: World) -> None:
    # 2^-8 is the spacing of bf16; errors of a forward and backward pass in it add up to some times as much.
    check(world.run(golden, TIED, "uneven", 1, torch.bfloat16, LAYOUTS[4][:-1]), tolerance=0.05)


def all_masked(
    model: Tiny, zero_stage: int, layouts: list[Layout]
) -> list[tuple[str, float, float, bool, list[str]]]:
    found = []
    for layout in layouts:
        with tiny.running(
            layout, model, "sgd", micro_batch_size=2, zero_stage=zero_stage, gradient_clip_norm=CLIP
        ) as engine:
            engine.measure_next = True
            loss = engine.step(tiny.share(engine, tiny.make_batch("masked"))).item()
            gradients = tiny.gathered(engine, "gradient")
            outcome = engine.update()
            assert outcome.norms is not None and outcome.norms.n_micro_batches == outcome.n_target_tokens == 0
            assert outcome.norms.weighted_micro_sq_norm_sum == outcome.norms.mean_sq_norm == 0
            after = tiny.train(engine, [tiny.make_batch("plain")])
            not_zero = [name for name, gradient in gradients.items() if gradient.abs().max().item() != 0]
            found.append((str(layout), loss, outcome.gradient_norm, math.isfinite(after[0]), not_zero))
    return found


@pytest.mark.parametrize(
    ("model", "zero_stage"), [(TIED, 0), (UNTIED, 1)], ids=["tied-zero0", "untied-zero1"]
)
def test_a_global_batch_without_targets_has_loss_and_gradient_zero(
    world: World, model: Tiny, zero_stage: int
) -> None:
    for found in world.run(all_masked, model, zero_stage, LAYOUTS[4][:-1]):
        for layout, loss, norm, finite, not_zero in found:
            assert (loss, norm, finite, not_zero) == (0.0, 0.0, True, []), layout
