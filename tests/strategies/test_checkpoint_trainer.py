"""`ModelCheckpoint`, `trainer.save_checkpoint` and `trainer.fit(ckpt_path=…)`, as with any strategy."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from strategy_runs import (
    Samples,
    assert_messages,
    assert_same_weights,
    build_model,
    build_optimizer,
    build_scheduler,
    configuration,
    indices,
)
from torch.utils.data import DataLoader
from world import World

from copus_lightning import Configuration, CopusCallback, CopusStrategy, CopusTrainerStrategy
from copus_lightning.data.sampler import GlobalOrder
from copus_lightning.engine.checkpoint_format import Manifest

DATASET, VALIDATION = Samples(200), Samples(16)
SEED = 5


class Module(pl.LightningModule):
    """What a user writes, with state of its own, and the notes that the tests read."""

    def __init__(
        self,
        width: int = 3,
        layers: int = 0,
        interval: str = "step",
        switches: dict[int, Configuration] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("width", "layers")
        self.model = build_model()
        if layers:
            self.model.model.layers = self.model.model.layers[:layers]
            self.model.config.num_hidden_layers = layers
        self.register_buffer("seen", torch.zeros(()))
        self.interval, self.switches = interval, switches or {}
        self.notes: dict[str, list[Any]] = {
            name: [] for name in ("losses", "samples", "rates", "draws", "happened")
        }

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        self.seen += 1
        self.notes["losses"].append(loss.item())
        self.notes["samples"].append(indices(batch))
        self.notes["draws"].append(torch.rand(()).item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.model)
        scheduler = {"scheduler": build_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.notes["rates"].append(strategy.learning_rate_of_step)
        self.notes["happened"].append(f"step {batch_idx}")
        if self.global_step in self.switches:
            strategy.switch(self.switches[self.global_step])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.notes["happened"].append("validation")

    def on_train_epoch_start(self) -> None:
        self.notes["happened"].append(f"epoch {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        self.notes["happened"].append("epoch's end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"seen": int(self.seen)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes["loaded"] = [checkpoint["note"], checkpoint["hyper_parameters"], checkpoint["epoch"]]

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.notes["weights"] = strategy.session.live.gather()


class Data(pl.LightningDataModule):
    """Data with a state."""

    def __init__(self, training: Samples = DATASET, seen: int = 0) -> None:
        super().__init__()
        self.training, self.seen = training, seen

    def train_dataloader(self) -> Any:
        return DataLoader(self.training, batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(VALIDATION, batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def build_trainer(strategy: Any, callbacks: list[Callback], devices: int = 2, **settings: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    chosen = {"max_epochs": -1, "enable_checkpointing": False, **quiet, **settings}
    if any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        chosen["enable_checkpointing"] = True
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, callbacks=callbacks, **chosen)


# -- the run that goes on ----------------------------------------------------------------------------------------

N_STEPS, SAVED_AT = 10, 7


class Look(Callback):
    """Notes what was restored, once it has been and before training goes on."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (copus,) = (c for c in trainer.callbacks if isinstance(c, CopusCallback))
        (stopping,) = (c for c in trainer.callbacks if isinstance(c, EarlyStopping))
        self.found = {
            "global_step": trainer.global_step,
            "controller": (copus.controller.step, copus.controller.samples),
            "noise": copus.controller.tracker.state_dict(),
            "factor": trainer.strategy.session.learning_rate_factor,
            "configuration": trainer.strategy.configuration,
            "waited": stopping.wait_count,
            "data": trainer.datamodule.seen,
            "seen": int(pl_module.seen),
        }


def whole_or_resumed(
    folder: str, layout: str, devices: int, path: str | None = None, async_save: bool = False
) -> dict[str, Any]:
    """A run whose batch grows from 4 to 8 after 5 steps, and that saves at step 7 unless it is taken up there."""
    torch.manual_seed(1)
    copus = CopusCallback(
        policy="ramp",
        ramp="0:4 250:8",
        global_batch_sizes=[4, 8],
        decide_every_tokens=1,
        learning_rate_rule="sqrt",
    )
    noise: dict[str, Any] = {}

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == SAVED_AT:
                noise.update(copus.controller.tracker.state_dict())

    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_last=True)
    stopping = EarlyStopping("loss", patience=100, check_on_train_epoch_end=False)
    look = Look()
    strategy = CopusTrainerStrategy(layout, seed=SEED, async_save=async_save)
    callbacks = [copus, stopping, look, Note(), *([] if path else [saver])]
    trainer = build_trainer(
        strategy, callbacks, devices, max_steps=N_STEPS, val_check_interval=3, check_val_every_n_epoch=None
    )
    module, data = Module(layers=0), Data(seen=0 if path else 12)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return {
        **module.notes,
        "found": look.found,
        "noise": noise,
        "steps": trainer.global_step,
        "waited": stopping.wait_count,
        "seconds": copus.controller.seconds["checkpointing"],
        "last": saver.last_model_path,
    }


def merged(by_rank: list[dict[str, Any]], ranks: list[int]) -> list[list[int]]:
    """The samples of each global batch, of one rank for each data rank."""
    return [
        list(itertools.chain(*parts))
        for parts in zip(*(by_rank[rank]["samples"] for rank in ranks), strict=True)
    ]


@pytest.mark.parametrize(
    ("layout", "devices", "data_ranks", "async_save"),
    [("dp1-tp2-pp1", 2, [0], False), ("dp2-tp1-pp2", 4, [0, 1], True)],
    ids=["tp2", "four-ranks-async"],
)
def test_a_run_that_is_taken_up_in_another_layout_is_the_run_that_went_on(
    world: World, tmp_path: Path, layout: str, devices: int, data_ranks: list[int], async_save: bool
) -> None:
    whole = world.run(whole_or_resumed, str(tmp_path), "dp2-tp1-pp1", 2, None, async_save, ranks=2)
    path = tmp_path / f"step={SAVED_AT}.ckpt"
    assert whole[0]["last"] == str(tmp_path / "last.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "last.ckpt"}
    batches = merged(whole, [0, 1])
    assert [len(batch) for batch in batches] == [4] * 5 + [8] * 5
    order = GlobalOrder(len(DATASET), SEED, shuffle=True)
    assert list(itertools.chain(*batches)) == [order.index(i) for i in range(60)]

    rest = world.run(whole_or_resumed, str(tmp_path / "b"), layout, devices, str(path), ranks=devices)
    assert merged(rest, data_ranks) == batches[SAVED_AT:]
    for found in rest:
        assert found["losses"] == pytest.approx(whole[0]["losses"][SAVED_AT:], rel=1e-6, abs=1e-6)
        assert found["rates"] == whole[0]["rates"][SAVED_AT:]
        assert found["happened"] == whole[0]["happened"][-len(found["happened"]) :]
        assert found["happened"].count("validation") == 1
        assert_same_weights(found["weights"], whole[0]["weights"])
        assert found["found"] == {
            "global_step": SAVED_AT,
            "controller": (SAVED_AT, 36),
            "noise": whole[0]["noise"],
            "factor": math.sqrt(2),
            "configuration": configuration(layout, 8),
            "waited": found["found"]["waited"],
            "data": 12,
            "seen": SAVED_AT,
        }
        assert found["steps"] == N_STEPS and found["waited"] == whole[0]["waited"]
        assert found["loaded"] == [{"seen": SAVED_AT}, {"width": 3, "layers": 0}, 0]
    for rank in range(2):
        assert rest[rank]["draws"] == whole[rank]["draws"][SAVED_AT:], "random generators go on"
    assert whole[0]["seconds"] > 0, "a save is not counted as training"
    manifest = Manifest.read(path)
    assert "state_dict" in manifest.labels["entries"] and "optimizer_states" not in manifest.labels["entries"]


# -- epochs ------------------------------------------------------------------------------------------------------

SHORT = Samples(40)
GROWS = {3: configuration("dp2-tp1-pp1", 8)}
SHRINKS = {3: configuration("dp2-tp1-pp1", 2)}
BY_EPOCHS, BY_STEPS, BY_BOTH = {"max_epochs": 3}, {"max_steps": 19}, {"max_epochs": 3, "max_steps": 99}


def epochs_run(
    folder: str,
    settings: dict[str, Any],
    when: dict[str, Any] | None,
    switches: dict[int, Configuration],
    path: str | None,
    layout: str,
) -> dict[str, Any]:
    """Epochs of ten steps, or as the switches make them."""
    callbacks: list[Callback] = []
    if when is not None:
        callbacks = [ModelCheckpoint(folder, "{step}", save_top_k=-1, **when)]
    strategy = CopusTrainerStrategy(layout, global_batch_size=4, seed=SEED)
    trainer = build_trainer(strategy, callbacks, num_sanity_val_steps=0, **settings)
    module = Module(interval="epoch", switches=switches)
    trainer.fit(module, datamodule=Data(SHORT), ckpt_path=path)
    logged = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step under which loggers get metrics
    return {**module.notes, "counters": (trainer.global_step, trainer.current_epoch, logged)}


AT = {
    "batch": lambda step: {"every_n_train_steps": step},
    "validation": lambda step: {"monitor": "val_loss", "every_n_epochs": 1, "save_on_train_epoch_end": False},
    "epoch": lambda step: {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


@pytest.mark.parametrize(
    ("settings", "when", "step", "switches"),
    [
        (BY_EPOCHS, "batch", 6, {}),
        (BY_EPOCHS, "batch", 10, {}),
        (BY_EPOCHS, "validation", 10, {}),
        (BY_EPOCHS, "epoch", 10, {}),
        (BY_STEPS, "batch", 10, {}),
        (BY_STEPS, "validation", 10, {}),
        (BY_BOTH, "epoch", 10, {}),
        ({**BY_BOTH, "limit_val_batches": 0}, "epoch", 10, {}),
        ({**BY_EPOCHS, "val_check_interval": 0.5}, "validation", 5, {}),
        ({**BY_EPOCHS, "val_check_interval": 4}, "batch", 5, {}),
        (BY_EPOCHS, "batch", 5, GROWS),
        (BY_BOTH, "epoch", 6, GROWS),  # 3·4 + 3·8, and 4 samples are left over to the next epoch
        (BY_EPOCHS, "batch", 12, SHRINKS),
        (BY_STEPS, "validation", 17, SHRINKS),
        ({**BY_EPOCHS, "limit_train_batches": 6}, "batch", 4, {}),
        ({**BY_BOTH, "limit_train_batches": 6}, "epoch", 6, {}),
        ({**BY_EPOCHS, "limit_train_batches": 0.5}, "batch", 6, {}),
    ],
)
def test_a_resumed_run_uses_each_sample_once_and_ends_where_it_would_have(
    world: World,
    tmp_path: Path,
    settings: dict[str, Any],
    when: str,
    step: int,
    switches: dict[int, Configuration],
) -> None:
    arguments = (settings, AT[when](step), switches, None, "dp2-tp1-pp1")
    whole = world.run(epochs_run, str(tmp_path), *arguments, ranks=2)
    batches = merged(whole, [0, 1])
    order = GlobalOrder(len(SHORT), SEED, shuffle=True)
    flat = list(itertools.chain(*batches))
    assert flat == [order.index(i) for i in range(len(flat))]

    path = str(tmp_path / f"step={step}.ckpt")
    rest = world.run(epochs_run, str(tmp_path / "b"), settings, None, switches, path, "dp1-tp1-pp2", ranks=2)[
        0
    ]
    assert rest["samples"] == batches[step:]
    assert rest["losses"] == pytest.approx(whole[0]["losses"][step:], rel=1e-5)
    assert rest["rates"] == whole[0]["rates"][step:]
    assert rest["counters"] == whole[0]["counters"]
    assert rest["happened"] and rest["happened"] == whole[0]["happened"][-len(rest["happened"]) :]
    assert_same_weights(rest["weights"], whole[0]["weights"])


def extended_run(folder: str) -> dict[str, Any]:
    """Saved when max_steps has cut an epoch short; goes on with more."""
    saver = ModelCheckpoint(folder, "cut", every_n_epochs=1, save_on_train_epoch_end=True)
    first, second = Module(interval="epoch"), Module(interval="epoch")
    for module, n_steps, path in ((first, 13, None), (second, 23, f"{folder}/cut.ckpt")):
        strategy = CopusTrainerStrategy(global_batch_size=4, seed=SEED)
        trainer = build_trainer(strategy, [] if path else [saver], max_steps=n_steps)
        trainer.fit(module, datamodule=Data(SHORT), ckpt_path=path)
        if path is None:
            assert os.path.isdir(f"{folder}/cut.ckpt")
    return {
        "samples": first.notes["samples"] + second.notes["samples"],
        **{"second": second.notes["happened"]},
    }


def test_an_epoch_that_was_cut_short_goes_on(world: World, tmp_path: Path) -> None:
    found = world.run(extended_run, str(tmp_path), ranks=2)
    order = GlobalOrder(len(SHORT), SEED, shuffle=True)
    assert list(itertools.chain(*merged(found, [0, 1]))) == [order.index(i) for i in range(23 * 4)]
    steps = [f"step {i}" for i in range(10)]
    assert found[0]["second"] == [
        *steps[3:],
        "validation",
        "epoch's end",
        "epoch 2",
        *steps[:3],
        "epoch's end",
    ]


# -- what else Trainer offers ------------------------------------------------------------------------------------


class Renames(Module):
    """Renames one weight, and leaves one out, in what it saves."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        weights["mine"] = weights.pop("model.model.norm.weight")
        del weights["model.lm_head.weight"]


class Halves(Module):
    """Computes with a weight in what it saves."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["model.lm_head.weight"] = (
            checkpoint["state_dict"]["model.lm_head.weight"] / 2
        )


class FullDisk(Module):
    """Has no space left for what is written after the first step, which its callbacks have seen before it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy: Any = self.trainer.strategy

        def fail(phase: str) -> None:
            if phase == "save: write" and strategy.global_rank == 1:
                raise OSError("no space left on device")

        if self.global_step == 1:
            strategy.session.live.fault = fail


class TooEarly(Module):
    """Saves before the batch in hand is trained."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "early.ckpt")


def odds_and_ends(folder: str) -> dict[str, Any]:
    """Top-k, last, links, refusals, and Fabric's view of it all."""
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            found[name] = ""
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error.args[0]}"

    def fit(module: Module, *callbacks: Callback, n_steps: int = 2, **settings: Any) -> Module:
        path, trusted = settings.pop("path", None), settings.pop("trusted", None)
        training = settings.pop("training", DATASET)
        strategy = CopusTrainerStrategy(
            "dp2-tp1-pp1", 4, seed=SEED, async_save=settings.pop("async_save", False)
        )
        trainer = build_trainer(
            strategy, list(callbacks), max_steps=n_steps, default_root_dir=folder, **settings
        )
        trainer.fit(module, datamodule=Data(training), ckpt_path=path, weights_only=trusted)
        return module

    for kind, async_save in ("top", False), ("top-async", True):
        saver = ModelCheckpoint(
            f"{folder}/{kind}",
            "{step}",
            monitor="loss",
            save_top_k=2,
            every_n_train_steps=1,
            save_last="link",
        )
        fit(Module(), saver, n_steps=6, async_save=async_save)
        found[kind] = {Path(path).name for path in saver.best_k_models}

    for kind, n_steps in ("full", 4), ("full-at-the-end", 2):
        saver = ModelCheckpoint(f"{folder}/{kind}", "{step}", every_n_train_steps=1)
        attempt(kind, lambda n=n_steps, s=saver: fit(FullDisk(), s, n_steps=n, async_save=True))

    saver = ModelCheckpoint(f"{folder}/mine", "best", every_n_train_steps=2, save_last=True)
    plain = ModelCheckpoint(f"{folder}/plain", "weights", every_n_train_steps=1, save_weights_only=True)
    first = fit(Renames(), saver, plain)
    found["weights"] = first.notes["weights"]
    again = ModelCheckpoint(f"{folder}/mine", "best", every_n_train_steps=4, save_last=True)
    second = fit(Module(), again, n_steps=4, path="last")
    found["last"] = len(second.notes["losses"])

    path, damaged = f"{folder}/mine/best.ckpt", f"{folder}/damaged"
    strategy = CopusStrategy("dp1-tp2-pp1", 4, seed=SEED)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = build_model()
    model, optimizer = fabric.setup(model, build_optimizer(model))
    fabric.setup_dataloaders(DataLoader(DATASET, batch_size=2, shuffle=True))
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    found["fabric"] = (rest["global_step"], strategy.session.train_loader.position, "lr_schedulers" in rest)
    fabric.save(f"{folder}/fabric", {"model": model, "optimizer": optimizer})
    strategy.teardown()

    if fabric.is_global_zero:
        shutil.copytree(path, damaged)
        shard = next(Path(damaged).glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-7])
    fabric.barrier()
    attempt("missing", lambda: fit(Module(), path=f"{folder}/nowhere"))
    attempt("damaged", lambda: fit(Module(), path=damaged))
    attempt("other model", lambda: fit(Module(layers=2), path=path))
    attempt("other data", lambda: fit(Module(), path=path, n_steps=9, training=SHORT))
    attempt("file", lambda: fit(Module(), path=f"{folder}/plain/weights.ckpt"))
    attempt("of fabric", lambda: fit(Module(), path=f"{folder}/fabric"))
    saver = ModelCheckpoint(f"{folder}/halves", save_weights_only=True, every_n_train_steps=1)
    attempt("computed", lambda: fit(Halves(), saver))
    attempt("too early", lambda: fit(TooEarly()))
    odd = Module(width=Path("x"))  # type: ignore[arg-type]
    fit(odd, ModelCheckpoint(f"{folder}/odd", "odd", every_n_train_steps=2))
    attempt("not plain", lambda: fit(Module(), path=f"{folder}/odd/odd.ckpt"))
    attempt("not plain, trusted", lambda: fit(Module(), path=f"{folder}/odd/odd.ckpt", trusted=False))
    return found


def test_what_else_a_trainer_may_do(world: World, tmp_path: Path) -> None:
    by_rank = world.run(odds_and_ends, str(tmp_path), ranks=2)
    for found in by_rank:
        for kind in "top", "top-async":
            assert len(found[kind]) == 2
            assert {path.name for path in (tmp_path / kind).iterdir()} == {*found[kind], "last.ckpt"}
            assert (tmp_path / kind / "last.ckpt").resolve().name in found[kind]
        for kind in "full", "full-at-the-end":
            assert {path.name for path in (tmp_path / kind).iterdir()} == {"step=1.ckpt"}, kind
            assert Manifest.read(tmp_path / kind / "step=1.ckpt").optimizer is not None
        assert found["last"] == 2, "two of four steps are left"
        assert found["fabric"] == (2, 8, True)
    expected = {
        "full": "rank 1 failed: OSError: no space left on device",
        "full-at-the-end": "rank 1 failed: OSError: no space left on device",
        "missing": "nowhere does not exist",
        "damaged": "bytes instead of",
        "other model": "that this model has not",
        "other data": "`n_samples` is 200 in the checkpoint and 40 here",
        "file": "weights.ckpt is a file, not a folder that Trainer wrote",
        "of fabric": "was saved by fabric.save, without the state of Trainer's loops",
        "computed": "state_dict['model.lm_head.weight'] was computed in on_save_checkpoint",
        "too early": "while a batch is fetched and not trained",
        "not plain": "pass weights_only=False if you trust its origin",
        "not plain, trusted": "",
    }
    assert_messages(by_rank, expected)
    saved = torch.load(tmp_path / "plain" / "weights.ckpt", weights_only=True)
    want = {f"model.{name}": value for name, value in by_rank[0]["weights"].items()}
    want["mine"] = want.pop("model.model.norm.weight")
    del want["model.lm_head.weight"]
    assert set(saved["state_dict"]) == {*want, "seen"}
    assert_same_weights({name: saved["state_dict"][name] for name in want}, want, 0.0)
