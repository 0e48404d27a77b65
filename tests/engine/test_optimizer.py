"""The user's optimizer as the handle: which classes are taken, and that it stays the truth over switches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from world import World

from copus_lightning.core.layout import Configuration, Layout

from . import tiny
from .tiny import N_SAMPLES, TIED, UNTIED

# -- which classes can be resharded ------------------------------------------------------------------------


class TrustRatio(Optimizer):
    """As LAMB does, scales each matrix's step by its norm: not elementwise, and keeps no state that says so."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.0),  # as a warm-up begins
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Lion": lambda p: tiny.Lion(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "TrustRatio": lambda p: TrustRatio(p),
}

KEPT = {
    "SGD": ((), ()),
    "momentum": (("momentum_buffer",), ()),
    "AdamW": (("exp_avg", "exp_avg_sq"), ("step",)),
    "amsgrad": (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",)),
    "NAdam": (("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    "RMSprop": (("square_avg", "grad_avg"), ("step",)),
    "Adagrad": (("sum",), ("step",)),
    "Lion": (("exp_avg",), ()),
}


def schema(name: str) -> Any:
    from copus_lightning.engine.optimizer import probe_schema

    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = OPTIMIZERS[name]([parameter])
    n_states = len(optimizer.state[parameter])
    try:
        found = probe_schema(optimizer, optimizer.param_groups[0], "optimizer.param_groups[0]")
        return set(found.elementwise), set(found.scalars)
    except ValueError as error:
        return str(error)
    finally:
        assert bool((parameter == 1).all()) and len(optimizer.state[parameter]) == n_states


def schemas(names: list[str]) -> list[Any]:
    return [schema(name) for name in names]


def test_what_an_optimizer_keeps_is_found_by_running_it(world: World) -> None:
    found = world.run(schemas, list(KEPT), ranks=1)[0]
    for (name, (elementwise, scalars)), one in zip(KEPT.items(), found, strict=True):
        assert one == (set(elementwise), set(scalars)), name


def test_optimizers_that_cannot_be_resharded_are_refused(world: World) -> None:
    names = ["Adafactor", "LBFGS", "TrustRatio"]
    for name, line in zip(names, world.run(schemas, names, ranks=1)[0], strict=True):
        assert isinstance(line, str), f"{name} is taken: {line}"
        assert line.startswith(f"optimizer.param_groups[0]: {name} cannot be resharded")
        assert "AdamW" in line and "\n" not in line


def handle_problems() -> list[str]:
    from copus_lightning.engine.optimizer import OptimizerHandle

    ours, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    lines = []
    for parameters in ([ours, other], [ours]):
        try:
            OptimizerHandle(torch.optim.SGD(parameters, lr=0.1), {id(ours): "ours"}, {"ours", "missed"})
        except ValueError as error:
            lines.append(str(error))
    return lines


def test_foreign_and_missing_parameters_are_named(world: World) -> None:
    foreign, missing = world.run(handle_problems, ranks=1)[0]
    assert foreign.startswith("optimizer.param_groups[0] holds a parameter that is not the model's: build")
    assert missing.startswith("the optimizer misses 1 trainable parameters of the model, first 'missed': add")


# -- the handle is the truth -------------------------------------------------------------------------------

PLACES = [Layout(data=4), Layout(data=2, pipeline=2), Layout(pipeline=4), Layout(data=4)]


def batches() -> list[tiny.Batch]:
    return [tiny.make_batch("counting", seed) for seed in range(2 * len(PLACES))]


def user_steps(optimizer: Optimizer) -> Callable[[int], None]:
    """What a script does between steps: a scheduler, and a hand on the groups."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    def between(index: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # here nobody calls the handle's own step()
            scheduler.step()
        if index == 3:
            optimizer.param_groups[1]["weight_decay"] = 0.5

    return between


def alone(kind: str) -> dict[str, torch.Tensor]:
    """Final weights of an ordinary loop."""
    model = UNTIED.build()
    optimizer = OPTIMIZERS[kind](_groups(model))
    between = user_steps(optimizer)
    for index, batch in enumerate(batches()):
        model(**batch).loss.backward()
        for group in optimizer.param_groups:
            group["lr"] *= _factor(index)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] /= _factor(index)
        optimizer.zero_grad()
        between(index)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": vectors, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ]


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum((one[name] - other[name]).double().square().sum().item() for name in other) ** 0.5


def _factor(index: int) -> float:
    return 2.0 if index % 3 == 2 else 1.0


def switched(kinds: list[str], zero_stage: int) -> list[float]:
    """How far a switched run ends from the ordinary loop, relative to the way that the weights went, by kind."""
    found = []
    for kind in kinds:
        model = UNTIED.build()
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = OPTIMIZERS[kind](_groups(model))
        between = user_steps(optimizer)
        with tiny.running(PLACES[0], model=model, optimizer=optimizer, zero_stage=zero_stage) as engine:
            for index, batch in enumerate(batches()):
                engine.switch(Configuration(PLACES[index // 2], N_SAMPLES, 2))
                engine.step(tiny.share(engine, batch))
                engine.update(learning_rate_factor=_factor(index))
                between(index)
            weights = tiny.gathered(engine)
        expected = alone(kind)
        found.append(_distance(weights, expected) / _distance(start, expected))
    return found


@pytest.mark.parametrize(
    ("zero_stage", "kinds"), [(0, ["amsgrad", "NAdam"]), (1, ["momentum", "RMSprop", "Adagrad"])]
)
def test_schedulers_and_changed_groups_act_over_switches(
    world: World, zero_stage: int, kinds: list[str]
) -> None:
    for found in world.run(switched, kinds, zero_stage):
        for kind, error in zip(kinds, found, strict=True):
            assert error < 1e-4, kind


def mixed_groups() -> tuple[list[str], list[tuple[int, int]]]:
    """A chain with momentum in one group alone."""
    model = TIED.build()
    groups = _groups(model)
    groups[1]["momentum"] = 0.9
    with tiny.running(PLACES[0], model=model, optimizer=torch.optim.SGD(groups, lr=0.1)) as engine:
        tiny.train(engine, batches()[:2])
        before = tiny.state(engine)
        reports = [engine.switch(Configuration(layout, N_SAMPLES, 1)) for layout in PLACES[1:]]
        after = tiny.state(engine)
        return tiny.differences(before, after), [(r.bytes_moved, r.bytes_lower_bound) for r in reports]


def test_groups_may_keep_different_states(world: World) -> None:
    for lost, reports in world.run(mixed_groups):
        assert lost == []
        assert all(moved == bound > 0 for moved, bound in reports)
