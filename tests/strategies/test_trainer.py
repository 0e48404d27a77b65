"""Trainer's face: an ordinary LightningModule, its loops, hooks and loggers, and switches in between."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
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
)
from torch import nn
from torch.utils.data import DataLoader
from world import World

from copus_lightning import Configuration, CopusCallback, CopusTrainerStrategy, Layout
from copus_lightning.core.records import read_events, read_metrics
from copus_lightning.data.sampler import GlobalOrder

TRAINING, VALIDATION = Samples(400), Samples(16)
SEED = 11
RELATIVE = 1e-4


class Module(pl.LightningModule):
    """What a user writes, and the notes that the tests read."""

    def __init__(
        self,
        interval: str = "step",
        loss_scale: float = 1.0,
        switches: dict[int, Configuration] | None = None,
    ) -> None:
        super().__init__()
        self.model = build_model()
        self.interval, self.loss_scale, self.switches = interval, loss_scale, switches or {}
        self.curve = Curve()
        self.happened: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        n_samples = torch.tensor(float(len(batch["input_ids"])))
        self.log("n_samples", n_samples, reduce_fx="sum", sync_dist=True, on_step=True)
        strategy: Any = self.trainer.strategy
        self.curve.losses.append(loss.item())
        self.curve.samples.append(indices(batch))
        self.curve.configurations.append(strategy.configuration)
        return loss * self.loss_scale

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model)
        scheduler = {"scheduler": build_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.curve.rates.append(strategy.learning_rate_of_step)
        self.curve.norms.append(strategy.session.outcome.gradient_norm)
        self.happened.append("step")
        if self.global_step in self.switches:
            strategy.switch(self.switches[self.global_step])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.happened.append("validation")

    def on_train_epoch_end(self) -> None:
        self.happened.append("epoch")

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.curve.weights = strategy.session.live.gather()
        self.curve.extra["global_step"] = self.global_step
        self.curve.extra["val_loss"] = float(self.trainer.callback_metrics.get("val_loss", torch.nan))


def build_trainer(strategy: Any, devices: int = 2, **settings: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    chosen = {"logger": False, "max_epochs": -1, **quiet, **settings}
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **chosen)


def fit(
    module: Module,
    trainer: pl.Trainer,
    training: Samples = TRAINING,
    shuffle: bool = True,
    batch_size: int = 2,
) -> Curve:
    loader = DataLoader(training, batch_size=batch_size, shuffle=shuffle)
    trainer.fit(module, loader, DataLoader(VALIDATION, batch_size=2))
    module.curve.extra["happened"] = module.happened
    return module.curve


# -- a run with switches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16)],
)
def test_the_precision_is_the_one_that_was_asked_for(precision: Any, wanted: torch.dtype) -> None:
    strategy = CopusTrainerStrategy()
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, precision=precision, logger=False)
    assert strategy.dtype == wanted and trainer.precision == precision


STEPS = 12
SWITCHES = {
    3: configuration("dp2-tp1-pp2", 16, 2),
    6: configuration("dp1-tp2-pp2", 16, 4),
    9: configuration("dp4-tp1-pp1", 8, 1),
}


def switching_run(folder: str) -> Curve:
    trainer = build_trainer(
        CopusTrainerStrategy(global_batch_size=8, seed=SEED),
        devices=4,
        max_steps=STEPS,
        callbacks=[LearningRateMonitor("step")],
        logger=CSVLogger(folder, name="csv"),
        log_every_n_steps=1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
    )
    return fit(Module(switches=SWITCHES), trainer)


def read_columns(folder: Path) -> Callable[[str], list[float]]:
    """Columns of what the CSV logger wrote, gaps left out."""
    with next(folder.glob("csv/*/metrics.csv")).open() as lines:
        logged = list(csv.DictReader(lines))
    return lambda name: [float(row[name]) for row in logged if row.get(name)]


def test_a_run_that_switches_is_the_plain_single_process_run(world: World, tmp_path: Path) -> None:
    curves = world.run(switching_run, str(tmp_path))
    configurations = by_step(configuration("dp4-tp1-pp1", 8), SWITCHES, STEPS)
    assert curves[0].configurations == configurations
    batches = global_batches(curves)
    assert_each_once_and_in_order(batches, GlobalOrder(len(TRAINING), SEED, shuffle=True))

    plain = plain_pytorch(TRAINING, batches, validation=VALIDATION)
    for curve in curves:
        assert curve.losses == pytest.approx(plain.losses, rel=RELATIVE)
        assert curve.norms == pytest.approx(plain.norms, rel=RELATIVE)
        assert curve.rates == plain.rates, "the rate of a step is read before its scheduler moves on"
        assert_same_weights(curve.weights, plain.weights, 1e-4)
        assert curve.extra["global_step"] == STEPS
        assert curve.extra["happened"].count("validation") == 3
        assert curve.extra["val_loss"] == pytest.approx(plain.extra["val_loss"][-1], rel=RELATIVE)

    column = read_columns(tmp_path)
    assert column("loss") == pytest.approx(plain.losses, rel=RELATIVE)
    assert column("n_samples") == [c.global_batch_size for c in configurations], "peers count once"
    assert column("lr-AdamW/pg1") == pytest.approx(plain.rates)
    validated = [plain.extra["val_loss"][step - 1] for step in (4, 8, 12)]
    assert column("val_loss") == pytest.approx(validated, rel=RELATIVE), "also with other data ranks"


# -- the callback ----------------------------------------------------------------------------------------------

ROUTE = (
    configuration("dp2-tp1-pp1", 4),
    configuration("dp2-tp1-pp1", 8),
    configuration("dp1-tp1-pp2", 8),
    configuration("dp2-tp1-pp1", 4, 2),
)


def run_with_decisions(folder: str) -> Curve:
    callback = CopusCallback(
        policy=Scripted(*ROUTE),
        global_batch_sizes=[4, 8],
        decide_every_tokens=120,
        run_dir=Path(folder) / "run",
        log_every_steps=1,
    )
    trainer = build_trainer(
        CopusTrainerStrategy(seed=SEED),
        max_steps=30,
        val_check_interval=30,
        check_val_every_n_epoch=None,
        callbacks=[callback],
        logger=CSVLogger(folder, name="csv"),
    )
    curve = fit(Module(), trainer)
    curve.extra |= callback.summary()
    return curve


def test_the_callback_changes_batch_layout_and_rate(world: World, tmp_path: Path) -> None:
    curves = world.run(run_with_decisions, str(tmp_path), ranks=2)
    assert distinct(curves[0].configurations) == list(ROUTE)
    batches = global_batches(curves)
    assert_each_once_and_in_order(batches, GlobalOrder(len(TRAINING), SEED, shuffle=True))
    factors = [(len(batch) / 4) ** 0.5 for batch in batches]
    plain = plain_pytorch(TRAINING, batches, factor=lambda step: factors[step])
    assert curves[0].losses == pytest.approx(plain.losses, rel=RELATIVE)
    assert curves[0].rates == plain.rates, "the factor never enters the user's optimizer"

    summary = curves[0].extra
    assert summary["global_step"] == summary["steps"] == 30
    assert (summary["layout_switches"], summary["batch_changes"]) == (2, 2)
    assert summary["seconds"]["evaluation"] > 0
    validations = [e for e in read_events(tmp_path / "run") if e["kind"] == "validation"]
    assert [e["val_loss"] for e in validations] == pytest.approx([summary["val_loss"]])
    rows = read_metrics(tmp_path / "run")
    used = [rate * factor for rate, factor in zip(plain.rates, factors, strict=True)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(used)
    column = read_columns(tmp_path)
    assert column("copus/global_batch_size") == [len(batch) for batch in batches]
    assert column("copus/learning_rate") == pytest.approx(used)


# -- epochs ----------------------------------------------------------------------------------------------------

SHORT = Samples(40)


def run_epochs(switches: dict[int, Configuration], n_epochs: int, limit: Any) -> Curve:
    strategy = CopusTrainerStrategy("dp2-tp1-pp1", global_batch_size=4)
    patient = EarlyStopping("val_loss", patience=9)  # asks all ranks for their vote
    trainer = build_trainer(strategy, max_epochs=n_epochs, limit_train_batches=limit, callbacks=[patient])
    return fit(Module("epoch", switches=switches), trainer, SHORT, shuffle=False)


GROWS = {5: configuration("dp1-tp1-pp2", 10)}
GROWS_AT_THE_END = {9: configuration("dp2-tp1-pp1", 8)}
SHRINKS = {5: configuration("dp2-tp1-pp1", 2)}
SHRINKS_EARLY = {3: configuration("dp2-tp1-pp1", 2)}
SHRINKS_AT_THE_END = {10: configuration("dp2-tp1-pp1", 2)}


@pytest.mark.parametrize(
    ("switches", "limit", "steps_by_epoch"),
    [
        (GROWS, 1.0, [7, 4, 4]),  # 5·4 + 2·10, then 4·10
        (GROWS_AT_THE_END, 1.0, [9, 5, 5]),  # 36 + 4 left over, which open the next: 44 = 5·8 + 4
        (SHRINKS, 1.0, [15, 20]),
        (SHRINKS_AT_THE_END, 1.0, [10, 20]),
        (GROWS, 6, [6, 1, 4]),  # the limit leaves ten samples of the data's first epoch to the second
        (SHRINKS_EARLY, 0.5, [8, 4]),  # half of 3 + 14, and of the 9 that are left then
    ],
)
def test_epochs_end_validate_and_step_schedulers_whatever_their_length(
    world: World, switches: dict[int, Configuration], limit: Any, steps_by_epoch: list[int]
) -> None:
    curves = world.run(run_epochs, switches, len(steps_by_epoch), limit, ranks=2)
    happened = [event for n in steps_by_epoch for event in ["step"] * n + ["validation", "epoch"]]
    assert curves[0].extra["happened"] == happened
    assert curves[0].configurations == by_step(configuration("dp2-tp1-pp1", 4), switches, sum(steps_by_epoch))
    assert_each_once_and_in_order(global_batches(curves), GlobalOrder(len(SHORT), 0, shuffle=False))
    rates = [0.01 * (epoch + 1) / 4 * 0.97**epoch for epoch, n in enumerate(steps_by_epoch) for _ in range(n)]
    assert curves[0].rates == pytest.approx(rates)
    assert curves[0].extra["global_step"] == sum(steps_by_epoch)


# -- settings of Trainer ---------------------------------------------------------------------------------------


def clipped_run() -> Curve:
    trainer = build_trainer(
        CopusTrainerStrategy("dp1-tp2-pp1", global_batch_size=4), max_steps=3, gradient_clip_val=0.1
    )
    return fit(Module(loss_scale=0.5), trainer)


def test_trainer_clips_by_the_global_norm_of_a_scaled_loss(world: World) -> None:
    curve = world.run(clipped_run, ranks=2)[0]
    plain = plain_pytorch(TRAINING, curve.samples, loss_scale=0.5, max_norm=0.1)
    assert min(plain.norms) > 0.1, "the limit acts"
    assert curve.norms == pytest.approx(plain.norms, rel=RELATIVE)
    assert_same_weights(curve.weights, plain.weights, 1e-4)


class Nested(Module):
    """A language model with tied embeddings under a second name, next to another module and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(tied=True)
        self.parts = nn.ModuleDict({"language": self.model, "dropout": nn.Dropout()})
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        assert self.parts["language"] is self.model
        return super().training_step(batch, batch_idx)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TRAINING, batch_size=3)

    def val_dataloader(self) -> Any:
        return DataLoader(VALIDATION, batch_size=2, shuffle=False)


def checkpointed_run(folder: str) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, "best", save_weights_only=True, every_n_train_steps=2)
    trainer = build_trainer("copus", max_steps=2, callbacks=[saver], enable_checkpointing=True)
    module = Nested()
    trainer.fit(module, datamodule=Data())
    after = ""
    try:
        trainer.save_checkpoint(Path(folder) / "late.ckpt", weights_only=True)
    except RuntimeError as error:
        after = str(error)
    return {"weights": module.curve.weights, "first": module.curve.configurations[0], "after": after}


def test_weights_are_saved_whole_and_load_without_the_strategy(world: World, tmp_path: Path) -> None:
    results = world.run(checkpointed_run, str(tmp_path), ranks=2)
    assert results[0]["first"] == configuration("dp2-tp1-pp1", 6), "the loader's batch on each data rank"
    assert "given up when fit() ended" in results[0]["after"]
    loaded = Nested.load_from_checkpoint(tmp_path / "best.ckpt", weights_only=False)
    assert loaded.seen == 2
    assert_same_weights(dict(loaded.model.named_parameters()), results[0]["weights"], 0.0)


def observed_run(observe: bool) -> Curve:
    callbacks = [CopusCallback(policy="static", decide_every_tokens=1)] if observe else []
    strategy = CopusTrainerStrategy("dp1-tp1-pp2", global_batch_size=4)
    return fit(Module(), build_trainer(strategy, max_steps=3, callbacks=callbacks, precision="bf16-true"))


def test_measuring_changes_nothing_in_bf16(world: World) -> None:
    alone, observed = world.run(observed_run, False, ranks=2), world.run(observed_run, True, ranks=2)
    for a, b in zip(alone, observed, strict=True):
        assert a.losses == b.losses and a.norms == b.norms
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


class Two(Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = build_model()


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Failing(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        raise RuntimeError(f"mine, with {self.model.config.vocab_size} tokens")


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [build_optimizer(self.model), build_optimizer(self.model)]


def refusals() -> dict[str, str]:
    messages = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        else:
            messages[name] = ""

    def attempt_fit(name: str, module: pl.LightningModule | None = None, **settings: Any) -> None:
        def action() -> None:
            trainer = build_trainer("copus", 1, **{"max_steps": 1, **settings})
            trainer.fit(module or Module(), DataLoader(TRAINING, batch_size=2))

        attempt(name, action)

    attempt_fit("accumulation", accumulate_grad_batches=2)
    attempt_fit("value", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    attempt_fit("manual", Manual())
    attempt_fit("optimizers", TwoOptimizers())
    attempt_fit("models", Two())
    attempt_fit("own error", Failing())
    attempt_fit("overfit", overfit_batches=1)
    attempt_fit("reload", reload_dataloaders_every_n_epochs=1)
    attempt_fit("precision", precision="64-true")
    loaders = [DataLoader(TRAINING), DataLoader(TRAINING)]
    attempt("loaders", lambda: build_trainer("copus", 1, max_steps=1).fit(Module(), loaders))
    attempt("list", lambda: build_trainer("copus", 1, max_steps=1).fit(Module(), list(loaders[0])))
    validation = DataLoader(VALIDATION)
    attempt("validate", lambda: build_trainer("copus", 1).validate(Module(), validation, verbose=False))
    attempt("resume", lambda: build_trainer("copus", 1).fit(Module(), loaders[0], ckpt_path="some.ckpt"))
    attempt("layout", lambda: build_trainer(CopusTrainerStrategy("dp4-tp1-pp1"), 1))
    attempt("callback", lambda: build_trainer("auto", 1, callbacks=[CopusCallback(policy="static")], max_steps=1).fit(
        Module(), loaders[0]
    ))  # fmt: skip

    trained = Module()
    trainer = build_trainer("copus", 1, max_steps=1)
    trainer.fit(trained, loaders[0])
    attempt("again", lambda: trainer.fit(trained, loaders[0]))
    trainer.fit_loop.epoch_loop.max_steps = 3
    attempt_fit("fast_dev_run", fast_dev_run=True)
    fresh = Module()
    trainer.fit(fresh, loaders[0])
    messages["a fresh module"] = str(fresh.global_step)
    return messages


def test_what_is_not_supported_is_refused_in_one_line(world: World) -> None:
    (messages,) = world.run(refusals, ranks=1)
    expected = {
        "accumulation": "accumulate_grad_batches=2",
        "value": 'use "norm"',
        "manual": "automatic_optimization",
        "optimizers": "multiple optimizers",
        "models": "2 Hugging Face models",
        "own error": "mine, with 97 tokens",
        "overfit": "overfit_batches",
        "reload": "reload_dataloaders_every_n_epochs",
        "precision": "bf16-mixed",
        "loaders": "one DataLoader",
        "list": "torch DataLoader",
        "validate": "trainer.validate()",
        "resume": "some.ckpt does not exist",
        "layout": "dp4-tp1-pp1",
        "callback": "CopusTrainerStrategy(...)",
        "again": "0 Hugging Face models",
        "fast_dev_run": "",
        "a fresh module": "3",
    }
    assert messages.keys() == expected.keys()
    for name, words in expected.items():
        assert words in messages[name], f"{name}: {messages[name]!r}"
        assert "\n" not in messages[name], messages[name]


def test_a_plain_layout_is_the_default() -> None:
    strategy = CopusTrainerStrategy()
    assert strategy.session.options.first_layout(3) == Layout(data=3)
    with pytest.raises(AssertionError, match="not launched"):
        _ = strategy.configuration


def test_nothing_is_launched_for_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", launch)
    trainer = build_trainer("copus", accumulate_grad_batches=4, max_steps=1)
    with pytest.raises(ValueError, match="accumulate_grad_batches=4"):
        trainer.fit(Module(), DataLoader(TRAINING))
    with pytest.raises(ValueError, match="use 6 or 8"):
        build_trainer(CopusTrainerStrategy(global_batch_size=7), max_steps=1)
    with pytest.raises(AssertionError, match="launched"):
        build_trainer("copus", max_steps=1).fit(Module(), DataLoader(TRAINING))
