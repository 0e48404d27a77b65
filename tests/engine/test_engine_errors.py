"""What the engine refuses, in one line that names the fix; and steps whose gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from world import World

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine.backend import load_deepspeed
from copus_lightning.engine.engine import EngineSettings

from . import tiny
from .tiny import N_SAMPLES, TIED, UNTIED, Tiny

DP4, TP4, PP4 = Layout(data=4), Layout(tensor=4), Layout(pipeline=4)


def message(kind: type[Exception], work: Callable[[], Any]) -> str:
    """The one line with which `work` is refused."""
    try:
        work()
    except kind as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError(f"not refused: {kind.__name__} expected")


# -- before there is a world -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_stage": 2}, "zero_stage must be 0 or 1, not 2"),
        ({"dtype": torch.float16}, "precision must be 32-true, bf16-true or bf16-mixed"),
        ({"gradient_clip_norm": 0.0}, "gradient_clip_norm must be positive or null"),
        ({"gradient_clip_norm": math.nan}, "gradient_clip_norm must be positive or null"),
    ],
)
def test_settings_name_their_key(settings: dict[str, Any], words: str) -> None:
    assert words in message(ValueError, lambda: EngineSettings(**settings))


def test_without_a_process_group_the_fix_is_named() -> None:
    assert "call fabric.launch()" in message(RuntimeError, lambda: load_deepspeed(torch.device("cpu")))


# -- construction ------------------------------------------------------------------------------------------


class NoPlan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def with_dropout() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.resid_pdrop = 0.1
    return PhiForCausalLM(config)


def frozen() -> nn.Module:
    model = UNTIED.build()
    model.lm_head.weight.requires_grad = False
    return model


def without_head(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for n, p in model.named_parameters() if n != "lm_head.weight"], lr=1e-3)


def with_foreign(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))], lr=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


CONSTRUCTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], Layout, str]] = {
    "world size": (UNTIED.build, adamw, Layout(data=2), "choose sizes whose product is 4"),
    "heads": (Tiny(n_kv_heads=2).build, adamw, TP4, "n_kv_heads=2 does not divide by the tensor size 4"),
    "factored optimizer": (
        UNTIED.build,
        lambda model: torch.optim.Adafactor(model.parameters()),
        DP4,
        "Adafactor cannot be resharded",
    ),
    "optimizer with a closure": (
        UNTIED.build,
        lambda model: torch.optim.LBFGS(model.parameters()),
        DP4,
        "LBFGS cannot be resharded",
    ),
    "foreign parameter": (
        UNTIED.build,
        with_foreign,
        DP4,
        "holds a parameter that is not the model's: build",
    ),
    "missing parameter": (UNTIED.build, without_head, DP4, "first 'lm_head.weight': add"),
    "frozen parameter": (
        frozen,
        adamw,
        DP4,
        "first 'lm_head.weight': frozen parameters are not supported yet",
    ),
    "no plan": (gpt2, adamw, DP4, "GPT2LMHeadModel has no pipeline plan"),
    "dropout": (with_dropout, adamw, DP4, "resid_dropout is a dropout of 0.1: ranks that hold"),
    "no Hugging Face model": (NoPlan, adamw, DP4, "NoPlan has no pipeline plan"),
}


def refused_constructions() -> dict[str, tuple[str, list[str]]]:
    """The message by case, and what the refusal has changed."""
    found = {}
    for name, (build, make, layout, _) in CONSTRUCTIONS.items():
        model = build()
        optimizer = make(model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}

        def construct(layout: Layout = layout, model: Any = model, optimizer: Any = optimizer) -> None:
            with tiny.running(layout, model=model, optimizer=optimizer):
                pass

        line = message(ValueError, construct)
        changed = [n for n, p in model.named_parameters() if p.is_meta or not torch.equal(p, before[n])]
        if (n := len(dist.distributed_c10d._world.pg_map)) > 1:
            changed.append(f"{n - 1} process groups")
        found[name] = (line, changed)
    return found


def test_refused_constructions_change_nothing(world: World) -> None:
    for found in world.run(refused_constructions):
        for name, (line, changed) in found.items():
            assert CONSTRUCTIONS[name][-1] in line, f"{name}: {line}"
            assert changed == [], f"{name}: {changed}"


# -- use ---------------------------------------------------------------------------------------------------


def misuse() -> tuple[dict[str, str], list[str]]:
    """Everything wrong that a script can do, with steps between; and the difference that it made."""
    batches = [tiny.make_batch("uneven", seed) for seed in range(3)]
    with tiny.running(DP4) as engine:
        tiny.train(engine, batches)
        expected = tiny.state(engine)
    lines = {}
    with tiny.running(DP4) as engine:
        mine = tiny.share(engine, batches[0])
        one, three = tiny.rows(mine, 0, 1), {k: torch.cat([v, v[:1]]) for k, v in mine.items()}
        lines["update first"] = message(RuntimeError, engine.update)
        lines["no moment yet"] = message(ValueError, lambda: engine.gather("exp_avg"))
        lines["no such state"] = message(ValueError, lambda: engine.gather("momentum"))
        lines["too small"] = message(ValueError, lambda: engine.step(one))
        lines["too large"] = message(ValueError, lambda: engine.step(three))
        tiny.train(engine, batches[:1])
        refused = {
            "world size": Configuration(Layout(data=2), N_SAMPLES, 1),
            "layers": Configuration(Layout(pipeline=8), N_SAMPLES, 1),
        }
        for name, configuration in refused.items():
            lines[name] = message(ValueError, lambda c=configuration: engine.switch(c))
        engine.step(tiny.share(engine, batches[1]))
        lines["twice"] = message(RuntimeError, lambda: engine.step(mine))
        for layout in (PP4, DP4):
            wanted = Configuration(layout, N_SAMPLES, 2)
            lines[f"between to {layout}"] = message(RuntimeError, lambda c=wanted: engine.switch(c))
        assert engine.update().applied
        engine.step(mine)
        engine.discard()
        lines["update after discard"] = message(RuntimeError, engine.update)
        tiny.train(engine, batches[2:])
        return lines, tiny.differences(expected, tiny.state(engine))


def test_misuse_is_named_and_costs_no_step(world: World) -> None:
    for lines, lost in world.run(misuse):
        assert lost == []
        assert (
            "before the model" in lines["update first"]
            and "before the model" in lines["update after discard"]
        )
        assert "before the first optimizer step" in lines["no moment yet"]
        assert "'momentum': choose among gradient, master, exp_avg, exp_avg_sq" in lines["no such state"]
        assert (
            "the batch has 1 samples" in lines["too small"] and "takes 2 per data rank" in lines["too small"]
        )
        assert "setup_dataloaders()" in lines["too small"] and "the batch has 3 samples" in lines["too large"]
        assert "choose sizes whose product is 4" in lines["world size"]
        assert "layout dp1-tp1-pp8" in lines["layers"]
        assert "drop the script's own gradient accumulation" in lines["twice"]
        for layout in (PP4, DP4):
            assert "between backward and optimizer.step() would lose" in lines[f"between to {layout}"]


# -- gradients that are not finite -------------------------------------------------------------------------


class Poison(NamedTuple):
    """What becomes of one gradient on one rank."""

    layout: Layout
    model: Tiny
    rank: int
    parameter: str
    value: float
    settings: dict[str, Any]


ATTENTION, NORM = "self_attn.k_proj.weight", "input_layernorm.weight"
# The second tensor rank's copy of a norm's weight is one that no rank counts in the global norm.
POISONS = [
    Poison(DP4, UNTIED, 2, NORM, math.nan, {"zero_stage": 1}),
    Poison(DP4, TIED, 3, "embed_tokens.weight", math.inf, {"zero_stage": 0, "gradient_clip_norm": 0.1}),
    Poison(Layout(2, 2, 1), UNTIED, 3, NORM, math.nan, {"zero_stage": 0}),
    Poison(Layout(1, 2, 2), TIED, 3, "embed_tokens.weight", -math.inf, {"zero_stage": 1}),
    Poison(PP4, TIED, 0, ATTENTION, math.nan, {"zero_stage": 1, "dtype": torch.bfloat16}),
]


class Survived(NamedTuple):
    """What one rank saw of a poisoned step."""

    applied: bool
    gradient_norm: float
    norms: Any
    changed: list[str]
    changed_later: list[str]


def poisoned_steps(poisons: list[Poison]) -> list[Survived]:
    found = []
    batches = [tiny.make_batch("uneven", seed) for seed in range(3)]
    for layout, model, rank, ending, value, settings in poisons:
        micro = N_SAMPLES // layout.data // (2 if layout.pipeline > 1 else 1)
        with tiny.running(layout, model, micro_batch_size=micro, **settings) as engine:
            tiny.train(engine, [batches[0], batches[2]])
            expected = tiny.state(engine)
        with tiny.running(layout, model, micro_batch_size=micro, **settings) as engine:
            tiny.train(engine, batches[:1])
            before = tiny.state(engine)
            hooks = []
            if engine.rank == rank:
                parameters = engine.live.optimizer.parameters
                target = next(p for name, p in parameters.items() if name.endswith(ending))
                hooks.append(target.register_hook(lambda gradient, value=value: gradient * value))
            engine.measure_next = True
            engine.step(tiny.share(engine, batches[1]))
            outcome = engine.update()
            for hook in hooks:
                hook.remove()
            changed = tiny.differences(before, tiny.state(engine))
            tiny.train(engine, batches[2:])
            later = tiny.differences(expected, tiny.state(engine))
            found.append(Survived(outcome.applied, outcome.gradient_norm, outcome.norms, changed, later))
    return found


def test_a_gradient_that_is_not_finite_on_one_rank_updates_nothing_on_any(world: World) -> None:
    by_rank = world.run(poisoned_steps, POISONS)
    for index, poison in enumerate(POISONS):
        for rank, found in enumerate(survived[index] for survived in by_rank):
            assert not found.applied and not math.isfinite(found.gradient_norm), f"{poison} on rank {rank}"
            assert found.norms is None
            assert found.changed == [], f"{poison} on rank {rank}"
            assert found.changed_later == [], f"{poison} on rank {rank}: training does not go on as before"


def overflowing_scale() -> tuple[list[bool], list[str]]:
    with tiny.running(DP4) as engine:
        tiny.train(engine, [tiny.make_batch()])
        before = tiny.state(engine)
        applied = []
        for scale in (math.inf, math.nan):
            engine.step(tiny.share(engine, tiny.make_batch()))
            applied.append(engine.update(gradient_scale=scale).applied)
        return applied, tiny.differences(before, tiny.state(engine))


def test_a_loss_scale_that_is_not_finite_updates_nothing(world: World) -> None:
    assert world.run(overflowing_scale) == [([False, False], [])] * 4
