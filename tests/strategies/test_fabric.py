"""Fabric's face: an ordinary loop, with everything that a script may do to it, and switches in between."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins import MixedPrecision
from strategy_runs import (
    Curve,
    Samples,
    Scripted,
    assert_each_once_and_in_order,
    assert_same_weights,
    build_model,
    build_optimizer,
    build_scheduler,
    by_step,
    configuration,
    distinct,
    global_batches,
    indices,
    plain_pytorch,
    rate_factor,
)
from torch.utils.data import DataLoader
from world import World

from copus_lightning import Configuration, CopusCallback, CopusStrategy
from copus_lightning.core.records import read_events, read_metrics
from copus_lightning.data.sampler import GlobalOrder

DATASET = Samples(400)
SEED = 11
RELATIVE = 1e-4

STEPS = 12
SWITCHES = {
    3: configuration("dp2-tp1-pp2", 16, 2),
    6: configuration("dp1-tp2-pp2", 16, 4),
    8: configuration("dp1-tp1-pp4", 8, 2),
    10: configuration("dp4-tp1-pp1", 8, 1),
}
"""After so many steps, through all three kinds of parallelism and back."""


def edit_groups(step: int, optimizer: torch.optim.Optimizer) -> None:
    """What a user does to param groups while training."""
    if step == 4:
        optimizer.param_groups[0]["weight_decay"] = 0.3
    if step == 7:
        optimizer.param_groups[1]["betas"] = (0.8, 0.9)


def train(
    strategy: Any,
    n_steps: int,
    callbacks: Any = (),
    loggers: Any = (),
    switches: dict[int, Configuration] | None = None,
    edit: Callable[[int, Any], None] = lambda step, optimizer: None,
    loss_scale: float = 1.0,
    max_norm: float | None = None,
    shuffle: bool = True,
    batch_size: int = 2,
    devices: int = 4,
    precision: Any = None,
    num_workers: int = 0,
    loader_first: bool = False,
) -> Curve:
    """An ordinary Fabric script; leaves the engine closed."""
    fabric = L.Fabric(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=list(callbacks),
        loggers=list(loggers),
        precision=precision,
    )
    fabric.launch()
    model = build_model()
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    loader = DataLoader(DATASET, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)
    if loader_first:
        loader = fabric.setup_dataloaders(loader)
    model, optimizer = fabric.setup(model, optimizer)
    if not loader_first:
        loader = fabric.setup_dataloaders(loader)
    curve = Curve()
    strategy = fabric.strategy
    try:
        for step, batch in enumerate(loader):
            edit(step, optimizer)
            curve.configurations.append(strategy.configuration)
            loss = model(**batch).loss
            fabric.backward(loss * loss_scale)
            if max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            curve.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            curve.losses.append(loss.item())
            curve.norms.append(strategy.session.outcome.gradient_norm)
            curve.samples.append(indices(batch))
            if step + 1 == n_steps:
                break
            if switches and step + 1 in switches:
                strategy.switch(switches[step + 1])
        curve.weights = strategy.session.live.gather()
    finally:
        strategy.teardown()
    return curve


# -- a run with switches ---------------------------------------------------------------------------------------


def switching_run() -> Curve:
    strategy = CopusStrategy(layout="dp4-tp1-pp1", global_batch_size=8, seed=SEED)
    return train(strategy, STEPS, switches=SWITCHES, edit=edit_groups)


def test_a_run_that_switches_is_the_plain_single_process_run(world: World) -> None:
    curves = world.run(switching_run)
    assert curves[0].configurations == by_step(configuration("dp4-tp1-pp1", 8), SWITCHES, STEPS)
    batches = global_batches(curves)
    assert_each_once_and_in_order(batches, GlobalOrder(len(DATASET), SEED, shuffle=True))
    plain = plain_pytorch(DATASET, batches, edit=edit_groups)
    for curve in curves:
        assert curve.losses == pytest.approx(plain.losses, rel=RELATIVE)
        assert curve.norms == pytest.approx(plain.norms, rel=RELATIVE)
        assert curve.rates == plain.rates, "the scheduler and the optimizer are the user's own"
        assert_same_weights(curve.weights, plain.weights, 1e-4)


# -- the callback ----------------------------------------------------------------------------------------------


THERE = configuration("dp1-tp1-pp4", 8, 2)


def switching_with_callback(folder: str) -> Curve:
    strategy = CopusStrategy(layout="dp4-tp1-pp1", global_batch_size=8, seed=SEED)
    callback = CopusCallback(policy="static", run_dir=folder)

    def there_and_back(step: int, optimizer: Any) -> None:
        if step == 11:  # two switches between two steps
            strategy.switch(THERE)
            strategy.switch(SWITCHES[10])

    curve = train(strategy, STEPS, callbacks=[callback], switches=SWITCHES, edit=there_and_back)
    curve.extra = {"summary": callback.summary()}
    return curve


def test_a_switch_by_the_script_is_recorded_and_booked_like_one_of_the_policy(
    world: World, tmp_path: Path
) -> None:
    curves = world.run(switching_with_callback, str(tmp_path))
    assert curves[0].configurations == by_step(configuration("dp4-tp1-pp1", 8), SWITCHES, STEPS)
    events = read_events(tmp_path, "switch")
    expected = [*SWITCHES.items(), (11, THERE), (11, SWITCHES[10])]
    assert [(event["step"], event["to"]) for event in events] == [(at, to.to_dict()) for at, to in expected]
    summary = curves[0].extra["summary"]
    assert summary["layout_switches"] == sum(event["layout_changed"] for event in events) > 0
    assert summary["seconds"]["switching"] >= sum(event["total_seconds"] for event in events)


def run_with_ramp(folder: str) -> Curve:
    strategy = CopusStrategy(seed=SEED)
    callback = CopusCallback(
        policy="ramp",
        ramp="0:2 60:8 400:4",
        global_batch_sizes=[2, 4, 8],
        decide_every_tokens=1,
        learning_rate_rule="sqrt",
        run_dir=Path(folder) / "run",
        log_every_steps=1,
    )
    logger = CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)
    curve = train(strategy, 8, [callback], [logger], shuffle=False, batch_size=3, devices=2)
    curve.extra = callback.summary()
    return curve


def test_the_callback_changes_the_batch_and_the_rate_never_compounds(world: World, tmp_path: Path) -> None:
    curves = world.run(run_with_ramp, str(tmp_path), ranks=2)
    assert [len(samples) * 2 for samples in curves[0].samples] == [2, 2, 8, 8, 8, 4, 4, 4]
    batches = global_batches(curves)
    factors = [(len(batch) / 2) ** 0.5 for batch in batches]
    plain = plain_pytorch(DATASET, batches, factor=lambda step: factors[step])
    assert curves[0].losses == pytest.approx(plain.losses, rel=RELATIVE)
    assert_same_weights(curves[0].weights, plain.weights, 1e-4)
    assert curves[0].rates == plain.rates, "the factor never enters the user's optimizer"

    rows = read_metrics(tmp_path / "run")
    assert [row["learning_rate_factor"] for row in rows] == pytest.approx(factors)
    rates = [0.01 * rate_factor(step) * factor for step, factor in enumerate(factors)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    assert [row["global_batch_size"] for row in rows] == [2, 2, 8, 8, 8, 4, 4, 4]
    assert [event["kind"] for event in read_events(tmp_path / "run")].count("switch") == 2
    assert curves[0].extra["batch_changes"] == 2 and curves[0].extra["layout_switches"] == 0
    assert curves[0].extra["first_configuration"]["global_batch_size"] == 2

    with next(tmp_path.glob("csv/*/metrics.csv")).open() as lines:
        logged = list(csv.DictReader(lines))
    assert [float(row["copus/global_batch_size"]) for row in logged] == [2, 2, 8, 8, 8, 4, 4, 4]
    assert [float(row["copus/loss"]) for row in logged] == pytest.approx(plain.losses, rel=RELATIVE)
    assert {"copus/noise_scale", "copus/data_parallel", "copus/tokens", "copus/learning_rate"} <= set(
        logged[0]
    )


ROUTE = (configuration("dp2-tp1-pp1", 4), configuration("dp1-tp1-pp2", 4), configuration("dp2-tp1-pp1", 8, 2))


def run_with_layout_decisions() -> Curve:
    callback = CopusCallback(
        policy=Scripted(*ROUTE), global_batch_sizes=[4, 8], decide_every_tokens=120, learning_rate_rule="none"
    )
    curve = train(CopusStrategy(seed=SEED), 30, [callback], devices=2, num_workers=1)
    curve.extra = {**callback.summary(), "noise_trace": callback.controller.tracker.trace}
    return curve


def test_the_callback_changes_the_layout(world: World) -> None:
    curves = world.run(run_with_layout_decisions, ranks=2)
    assert distinct(curves[0].configurations) == list(ROUTE), "each layout is prepared while training goes on"
    batches = global_batches(curves)
    assert_each_once_and_in_order(batches, GlobalOrder(len(DATASET), SEED, shuffle=True))
    plain = plain_pytorch(DATASET, batches)
    assert curves[0].losses == pytest.approx(plain.losses, rel=RELATIVE)
    assert curves[0].extra["layout_switches"] == 2
    assert curves[0].extra["noise_trace"] > 0
    assert curves[0].extra["noise_trace"] == curves[1].extra["noise_trace"], "all ranks estimate the same"


def types(precision: str, as_plugin: bool) -> tuple[set[torch.dtype], float]:
    """Of the weights that are trained, and the loss of a step."""
    plugin = MixedPrecision("bf16-mixed", "cpu") if as_plugin else None
    strategy = CopusStrategy(layout="dp2-tp1-pp1", global_batch_size=8, seed=SEED, precision=plugin)
    wanted: Any = None if as_plugin else precision
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=wanted)
    fabric.launch()
    try:
        model = build_model()
        model, _ = fabric.setup(model, build_optimizer(model))
        loss = model(**{"input_ids": torch.arange(128).view(4, 32) % 90}).loss
        live = strategy.session.live.live
        assert live is not None
        return {p.dtype for p in live.optimizer.parameters.values()}, loss.item()
    finally:
        strategy.teardown()


def test_the_precision_is_the_one_that_was_asked_for(world: World) -> None:
    whole, exact = world.run(types, "32-true", False, ranks=2)[0]
    assert whole == {torch.float32}
    for precision, as_plugin in (("bf16-mixed", False), ("bf16-true", False), ("bf16-mixed", True)):
        half, rounded = world.run(types, precision, as_plugin, ranks=2)[0]
        assert half == {torch.bfloat16} and 0 < abs(rounded - exact) < 0.05


def run_observed(observe: bool, zero_stage: int, precision: str) -> Curve:
    callbacks = [CopusCallback(policy="static", decide_every_tokens=1)] if observe else []
    strategy = CopusStrategy("dp1-tp1-pp2", 4, zero_stage=zero_stage, seed=SEED)
    return train(strategy, 4, callbacks, devices=2, precision=precision)


@pytest.mark.parametrize(("zero_stage", "precision"), [(1, "bf16-mixed"), (0, "32-true")])
def test_measuring_changes_nothing(world: World, zero_stage: int, precision: str) -> None:
    alone = world.run(run_observed, False, zero_stage, precision, ranks=2)
    observed = world.run(run_observed, True, zero_stage, precision, ranks=2)
    for a, b in zip(alone, observed, strict=True):
        assert a.losses == b.losses and a.norms == b.norms
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def run_without_a_batch(with_callback: bool, loader_first: bool) -> list[Configuration]:
    callbacks = [CopusCallback(policy="static", global_batch_sizes=[2, 4])] if with_callback else []
    curve = train(CopusStrategy(), 1, callbacks, batch_size=3, devices=2, loader_first=loader_first)
    return curve.configurations


@pytest.mark.parametrize("loader_first", [False, True])
def test_the_first_batch_is_the_callbacks_smallest_else_the_loaders(world: World, loader_first: bool) -> None:
    chosen = world.run(run_without_a_batch, True, loader_first, ranks=2)[0]
    assert chosen == [configuration("dp2-tp1-pp1", 2)]
    left_to_the_loader = world.run(run_without_a_batch, False, loader_first, ranks=2)[0]
    assert left_to_the_loader == [configuration("dp2-tp1-pp1", 6)]


# -- what a script does with the loss --------------------------------------------------------------------------


def run_scaled(loss_scale: float, max_norm: float | None) -> Curve:
    strategy = CopusStrategy("dp1-tp2-pp1", global_batch_size=4, seed=SEED)
    return train(strategy, 3, loss_scale=loss_scale, max_norm=max_norm, devices=2)


def test_a_scaled_loss_scales_the_gradient_and_clipping_limits_it(world: World) -> None:
    whole, half = world.run(run_scaled, 1.0, None, ranks=2)[0], world.run(run_scaled, 0.5, None, ranks=2)[0]
    assert half.norms[0] == pytest.approx(whole.norms[0] / 2, rel=1e-6)
    assert half.losses[0] == whole.losses[0]
    clipped = world.run(run_scaled, 0.5, 0.1, ranks=2)
    plain = plain_pytorch(DATASET, clipped[0].samples, loss_scale=0.5, max_norm=0.1)
    assert min(plain.norms) > 0.1, "the limit acts"
    assert clipped[0].norms == pytest.approx(plain.norms, rel=RELATIVE)
    assert_same_weights(clipped[0].weights, plain.weights, 1e-4)


def misuse(folder: str) -> dict[str, str]:
    """Error messages of what a script may do wrong."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="copus")
    fabric.launch()
    messages = {"strategy": type(fabric.strategy).__name__}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)
        else:
            messages[name] = ""

    attempt("model alone", lambda: fabric.setup_module(build_model()))
    model = build_model()
    model, optimizer = fabric.setup(model, build_optimizer(model))
    loader = fabric.setup_dataloaders(DataLoader(DATASET, batch_size=1))
    try:
        second = build_model()
        attempt("second model", lambda: fabric.setup(second, build_optimizer(second)))
        batch = next(iter(loader))
        loss = model(**batch).loss
        attempt("no backward", optimizer.step)
        fabric.backward(loss)
        attempt("by value", lambda: fabric.clip_gradients(model, optimizer, clip_val=1.0))
        attempt(
            "infinity norm", lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf")
        )
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e9)
        attempt("own accumulation", lambda: model(**batch))
        optimizer.step()
        messages["norm"] = str(
            torch.isclose(norm, torch.tensor(fabric.strategy.session.outcome.gradient_norm))
        )
        attempt("does not fit", lambda: fabric.strategy.switch(configuration("dp1-tp1-pp4", 4)))
    finally:
        fabric.strategy.teardown()
    other = L.Fabric(accelerator="cpu", devices=2, strategy=CopusStrategy(micro_batch_size=3))
    other.launch()
    attempt("micro-batch", lambda: other.setup_dataloaders(DataLoader(DATASET, batch_size=4)))
    attempt("layout", lambda: L.Fabric(accelerator="cpu", devices=2, strategy=CopusStrategy("dp4-tp1-pp1")))
    attempt(
        "batch", lambda: L.Fabric(accelerator="cpu", devices=2, strategy=CopusStrategy(global_batch_size=3))
    )
    attempt(
        "precision", lambda: L.Fabric(accelerator="cpu", devices=2, strategy="copus", precision="16-true")
    )
    return messages


def test_misuse_gets_one_clear_line(world: World, tmp_path: Path) -> None:
    messages = world.run(misuse, str(tmp_path), ranks=2)[0]
    assert messages.pop("strategy") == "CopusStrategy"
    assert messages.pop("norm") == "tensor(True)"
    expected = {
        "model alone": "fabric.setup(model, optimizer)",
        "second model": "one model",
        "no backward": "fabric.backward(loss)",
        "by value": "max_norm",
        "infinity norm": "2-norm",
        "own accumulation": "gradient accumulation",
        "does not fit": "dp1-tp1-pp4",
        "micro-batch": "micro_batch_size=3 does not divide the 4 samples",
        "layout": "dp4-tp1-pp1",
        "batch": "3",
        "precision": "bf16-mixed",
    }
    assert messages.keys() == expected.keys()
    for name, words in expected.items():
        assert words in messages[name], f"{name}: {messages[name]!r}"
        assert "\n" not in messages[name]
