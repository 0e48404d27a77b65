"""`fabric.save` and `fabric.load`, as a script uses them with any strategy."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from strategy_runs import (
    Samples,
    Scripted,
    assert_messages,
    build_model,
    build_optimizer,
    build_scheduler,
    configuration,
    indices,
)
from torch.utils.data import DataLoader
from world import World

from copus_lightning import Configuration, CopusCallback, CopusStrategy, Layout
from copus_lightning.callbacks.preemption import Preemption
from copus_lightning.data.sampler import GlobalOrder
from copus_lightning.engine.checkpoint_format import Manifest, newest
from copus_lightning.strategies.checkpoints import fitting

DATASET = Samples(200)
SEED = 5


@dataclass
class Script:
    """The objects of a Fabric script."""

    fabric: Any
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    callback: CopusCallback
    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def state(self) -> dict[str, Any]:
        """What it saves and loads."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "copus": self.callback,
            "step": len(self.losses),
        }

    def train(self, n_steps: int, after: Callable[[int], None] = lambda step: None) -> None:
        for batch in self.loader:
            loss = self.model(**batch).loss
            self.fabric.backward(loss)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())
            self.samples.append(indices(batch))
            after(len(self.losses))
            if len(self.losses) == n_steps:
                return


@contextmanager
def script(
    layout: str,
    devices: int = 2,
    global_batch_size: int | None = None,
    callback: CopusCallback | None = None,
    **options: Any,
) -> Iterator[Script]:
    """A script up to its loop; two ranks, and a batch that grows from 4 to 8 after 5 steps."""
    callback = callback or CopusCallback(
        policy="ramp",
        ramp="0:4 250:8",
        global_batch_sizes=[4, 8],
        decide_every_tokens=1,
        learning_rate_rule="sqrt",
    )
    strategy = CopusStrategy(layout, global_batch_size, seed=SEED, **options)
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, callbacks=[callback])
    fabric.launch()
    model = build_model()
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(DATASET, batch_size=2, shuffle=True))
    try:
        yield Script(fabric, model, optimizer, scheduler, loader, callback)
    finally:
        fabric.strategy.teardown()


N_STEPS, SAVED_AT = 10, 7


def uninterrupted(path: str, async_save: bool) -> dict[str, Any]:
    """A run that saves on its way."""
    noise: dict[str, Any] = {}
    with script("dp2-tp1-pp1", async_save=async_save) as run:

        def save(step: int) -> None:
            if step == SAVED_AT:
                noise.update(run.callback.controller.tracker.state_dict())
                run.fabric.save(path, {**run.state, "note": {"left": "over"}})

        run.train(N_STEPS, save)
        seconds = run.callback.controller.seconds["checkpointing"]
        curves = {"losses": run.losses, "samples": run.samples, "rates": run.rates}
        return {**curves, "seconds": seconds, "noise": noise}


def resumed(path: str, layout: str, loader_last: bool) -> dict[str, Any]:
    """A run that takes it up."""
    with script(layout) as run:
        if loader_last:
            run.fabric.strategy.session.train_loader = None
        state = run.state
        remainder = run.fabric.load(path, state)
        if loader_last:
            run.loader = run.fabric.setup_dataloaders(DataLoader(DATASET, batch_size=2, shuffle=True))
        controller = run.callback.controller
        found = {
            "step": state["step"],
            "remainder": remainder,
            "counters": (controller.step, controller.samples),
            "noise": controller.tracker.state_dict(),
            "configuration": run.fabric.strategy.configuration,
            "factor": run.fabric.strategy.session.learning_rate_factor,
        }
        run.train(N_STEPS - SAVED_AT)
        return {**found, "losses": run.losses, "samples": run.samples, "rates": run.rates}


def merged(by_rank: list[dict[str, Any]], data_ranks: int, key: str = "samples") -> list[list[int]]:
    """The samples of each global batch."""
    return [
        list(itertools.chain(*parts))
        for parts in zip(*(found[key] for found in by_rank[:data_ranks]), strict=True)
    ]


@pytest.mark.parametrize(
    ("layout", "async_save", "loader_last"),
    [("dp1-tp2-pp1", False, False), ("dp1-tp1-pp2", True, True)],
    ids=["tp2", "pp2-async"],
)
def test_a_run_that_is_taken_up_in_another_layout_is_the_run_that_went_on(
    world: World, tmp_path: Path, layout: str, async_save: bool, loader_last: bool
) -> None:
    path = tmp_path / "run" / "step-7"
    whole = world.run(uninterrupted, str(path), async_save, ranks=2)
    rest = world.run(resumed, str(path), layout, loader_last, ranks=2)
    batches = merged(whole, 2)
    assert [len(batch) for batch in batches] == [4] * 5 + [8] * 5
    order = GlobalOrder(len(DATASET), SEED, shuffle=True)
    assert list(itertools.chain(*batches)) == [order.index(i) for i in range(60)]
    for found in rest:
        assert found["losses"] == pytest.approx(whole[0]["losses"][SAVED_AT:], rel=1e-6, abs=1e-6)
        assert found["rates"] == whole[0]["rates"][SAVED_AT:]
        assert found["samples"] == batches[SAVED_AT:]
        assert found["step"] == SAVED_AT
        assert found["remainder"] == {"note": {"left": "over"}}
        assert found["counters"] == (SAVED_AT, 36)
        assert found["noise"] == whole[0]["noise"]
        assert found["configuration"] == configuration(layout, 8)
        assert found["factor"] == math.sqrt(2)
    assert whole[0]["seconds"] > 0, "a save is not counted as training"
    assert newest(path.parent) == path
    assert Manifest.read(path).labels["names"] == {"model": "model", "optimizer": "optimizer"}


def odds_and_ends(folder: str) -> dict[str, Any]:
    """Everything else that a script may do."""
    found: dict[str, Any] = {}
    path, weights, plain = f"{folder}/full", f"{folder}/weights", f"{folder}/plain.pt"

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            found[name] = ""
        except (ValueError, KeyError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error.args[0]}"

    with script("dp2-tp1-pp1") as run:
        run.train(2)
        fabric, state = run.fabric, run.state
        fabric.save(path, state)
        fabric.save(weights, {"model": run.model, "epoch": 3})
        fabric.save(plain, {"epoch": 4})
        trained = run.fabric.strategy.session.live.gather()
        moments = run.fabric.strategy.session.live.gather("exp_avg")

        whole = fabric.load(path)
        found["whole"] = {
            "keys": set(whole),
            "weights": all(torch.equal(whole["model"][n], trained[n]) for n in trained),
            "moments": all(
                torch.equal(whole["optimizer"]["state"][n]["exp_avg"], moments[n]) for n in trained
            ),
            "steps": {float(s["step"]) for s in whole["optimizer"]["state"].values()},
            "decay": [group["weight_decay"] for group in whole["optimizer"]["param_groups"]],
        }
        found["plain"] = fabric.load(plain)
        found["entries alone"] = (fabric.load(path, own := {"step": 0}).keys() == {"scheduler", "copus"}, own)

        run.train(4)
        position = fabric.strategy.session.train_loader.position
        found["weights alone"] = fabric.load(weights, {"model": run.model})
        now = fabric.strategy.session.live.gather()
        found["weights are back"] = all(torch.equal(now[n], trained[n]) for n in trained)
        found["position stays"] = position == fabric.strategy.session.train_loader.position
        run.train(5)
        fabric.load_raw(path, run.model)
        now = fabric.strategy.session.live.gather()
        found["raw"] = all(torch.equal(now[n], trained[n]) for n in trained)

        attempt("raw optimizer", lambda: fabric.load_raw(path, run.optimizer))
        attempt("raw file", lambda: fabric.load_raw(plain, run.model))
        attempt("nowhere", lambda: fabric.load(f"{folder}/nowhere", state))
        attempt("weights only", lambda: fabric.load(weights, state))
        attempt("other name", lambda: fabric.load(path, {"net": run.model}))
        attempt("unknown key", lambda: fabric.load(path, {**state, "ema": 1}))
        attempt("unknown key, not strict", lambda: fabric.load(path, {**state, "ema": 1}, strict=False))
        attempt("filter", lambda: fabric.save(path, state, filter={"model": lambda name, value: True}))
        attempt(
            "own filter",
            lambda: fabric.save(path, state, filter={"copus": lambda name, value: name == "step"}),
        )
        attempt("optimizer alone", lambda: fabric.save(path, {"optimizer": run.optimizer}))
        attempt("twice", lambda: fabric.save(path, {"a": run.model, "b": run.model}))
        attempt("an object", lambda: fabric.save(path, {**state, "object": Path("x")}))
        attempt("an object back", lambda: fabric.load(path, state))
        attempt("an object trusted", lambda: fabric.load(path, state, weights_only=False))

        other = DataLoader(Samples(100), batch_size=2, shuffle=True)
        fabric.strategy.session.train_loader = None
        fabric.setup_dataloaders(other)
        run.optimizer.param_groups[0]["lr"] = 123.0
        attempt("other data", lambda: fabric.load(path, state, weights_only=False))
        found["nothing overwritten"] = run.optimizer.param_groups[0]["lr"] == 123.0
    with script("dp2-tp1-pp1", global_batch_size=6, async_save=True) as run:
        run.fabric.save(f"{folder}/six", run.state)
        run.train(1)
        (held,) = itertools.islice(run.loader, 1)
        run.fabric.strategy.session.live.fault = slow_to_write
        run.fabric.save(f"{folder}/held", run.state)  # at the top of the loop
        found["being written"] = set(run.fabric.load(f"{folder}/held"))
        run.fabric.load(f"{folder}/held", run.state)
        run.train(3)
        found["held"], found["next"] = indices(held), run.samples[1:]
    return found


def slow_to_write(phase: str) -> None:
    if phase == "save: write":
        time.sleep(0.3)


def four(folder: str) -> tuple[Configuration, list[str]]:
    """A batch of 6 comes to four data ranks."""
    with (
        script("dp4-tp1-pp1", devices=4, global_batch_size=8) as run,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        run.fabric.load(f"{folder}/six", run.state)
        said = [str(w.message) for w in seen if "does not divide" in str(w.message)]
        return run.fabric.strategy.configuration, said


def test_what_else_a_script_may_do(world: World, tmp_path: Path) -> None:
    by_rank = world.run(odds_and_ends, str(tmp_path), ranks=2)
    found = by_rank[0]
    keys = {"model", "optimizer", "scheduler", "copus", "step"}
    assert found["whole"] == {
        "keys": keys,
        "weights": True,
        "moments": True,
        "steps": {2.0},
        "decay": [0.1, 0.0],
    }
    assert found["plain"] == {"epoch": 4}
    assert found["entries alone"] == (True, {"step": 2})
    assert found["weights alone"] == {"epoch": 3}
    assert found["weights are back"] and found["position stays"] and found["raw"]
    assert found["nothing overwritten"]
    assert found["being written"] == keys
    order = GlobalOrder(len(DATASET), SEED, shuffle=True)
    assert merged(by_rank, 2, "next") == [[order.index(i) for i in range(n, n + 4)] for n in (6, 10)]
    assert found["held"] == found["next"][0], "a batch in hand at the save is the next one"
    expected = {
        "raw optimizer": "ValueError: AdamW alone cannot be loaded",
        "raw file": "is a file, not a folder that fabric.save or Trainer wrote with this strategy",
        "nowhere": "nowhere does not exist",
        "weights only": "holds weights alone: load the model without the optimizer",
        "other name": "KeyError: the state has the model as 'net'",
        "unknown key": "KeyError: the state has a key 'ema'",
        "unknown key, not strict": "",
        "filter": "ValueError: filter={'model': …} is not supported",
        "own filter": "",
        "optimizer alone": "ValueError: state['optimizer'] is the optimizer",
        "twice": "under two names, ['a', 'b']",
        "an object": "",
        "an object back": "pass weights_only=False if you trust its origin",
        "an object trusted": "",
        "other data": "`n_samples` is 200 in the checkpoint and 100 here",
    }
    assert_messages(by_rank, expected)

    kept = world.run(four, str(tmp_path))
    assert {chosen for chosen, _ in kept} == {configuration("dp4-tp1-pp1", 8)}
    assert len(kept[0][1]) == 1 and not kept[1][1], "rank 0 says that the batch is another"


def test_a_saved_batch_is_taken_over_as_far_as_it_divides() -> None:
    saved = Configuration(Layout(2), 24, 4)
    for layout, present_micro, expected in [
        (Layout(2), 1, (24, 4)),
        (Layout(4), 3, (24, 3)),
        (Layout(4), 5, (24, 2)),
        (Layout(5), 1, (10, 1)),
    ]:
        present = Configuration(layout, 2 * layout.data * present_micro, present_micro)
        found = fitting(saved, present)
        assert (found.global_batch_size, found.micro_batch_size) == expected


class Picky(Scripted):
    """Knows some micro-batches alone."""

    known = frozenset({1, 2})

    def check(self, configuration: Configuration) -> None:
        if configuration.micro_batch_size not in self.known:
            raise ValueError(f"{configuration} is not known")


HERE, THERE = configuration("dp2-tp1-pp1", 4, 2), configuration("dp1-tp1-pp2", 4, 2)
REDUCED = configuration("dp2-tp1-pp1", 4, 1)


def taken_back(path: str) -> dict[str, Any]:
    """Twice a switch is decided on and cannot be made any more: the run is taken back, or out of memory."""
    policy = Picky(HERE, THERE, REDUCED, configuration("dp1-tp1-pp2", 4, 1))
    callback = CopusCallback(policy=policy, decide_every_tokens=1, learning_rate_rule="none")
    went: list[Configuration | None] = []
    with script("dp2-tp1-pp1", 2, 4, callback, micro_batch_size=2) as run:
        session, rank = run.fabric.strategy.session, run.fabric.global_rank

        def after(step: int) -> None:
            went.append(session.configuration)

        def run_out(phase: str) -> None:
            if phase == "micro-batch" and rank == 1:
                session.live.fault = lambda phase: None
                raise MemoryError("injected")

        run.train(1, after)
        run.fabric.save(path, run.state)
        pending = [callback.controller.pending]
        run.fabric.load(path, run.state)
        run.train(2, after)
        pending.append(callback.controller.pending)
        session.live.fault = run_out
        run.train(3, after)
        session.live.fault = lambda phase: None
        run.train(6, after)
        found: dict[str, Any] = {"went": went, "pending": pending, "samples": list(run.samples)}
        found["failures"] = callback.controller.switch_failures

        known = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for policy.known in (frozenset({1}), frozenset({2, 4}), frozenset({8})):
                run.fabric.load(path, run.state)
                assert session.configuration == session.live.configuration
                assert session.configuration == callback.controller.configuration
                known.append(session.configuration)
        run.train(7)
        found["known"] = known
        found["said"] = [str(w.message) for w in seen if "is not known to the policy" in str(w.message)]
    return found


def test_a_switch_that_was_decided_on_is_forgotten_when_the_run_is_elsewhere(
    world: World, tmp_path: Path
) -> None:
    for rank, found in enumerate(world.run(taken_back, str(tmp_path / "saved"), ranks=2)):
        assert found["pending"] == [THERE, THERE]
        reached = configuration("dp1-tp1-pp2", 4, 1)
        assert found["went"] == [HERE, HERE, REDUCED, reached, reached, reached]
        assert found["failures"] == 1
        assert len(found["samples"][-1]) == 4
        # What a run is taken up in is what the policy knows, the saved micro-batch if it can be.
        assert found["known"] == [reached, THERE, THERE]
        assert len(found["said"]) == (1 if rank == 0 else 0)


def asked_to_leave() -> list[bool]:
    """What every rank hears before and after one of them gets SIGTERM, and that the handler goes again."""
    before = signal.getsignal(signal.SIGTERM)
    with script("dp2-tp1-pp1") as run:
        with Preemption(run.fabric.strategy.session) as preemption:
            answers = [preemption.requested()]
            if run.fabric.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            run.train(1)
            answers += [preemption.requested(), preemption.received]
        answers.append(signal.getsignal(signal.SIGTERM) is before)
    return answers


def test_a_signal_to_one_rank_is_heard_by_all_after_the_same_step(world: World) -> None:
    assert world.run(asked_to_leave, ranks=2) == [[False, True, False, True], [False, True, True, True]]


def as_documented(folder: str, block: str) -> tuple[int, int, bool]:
    """Runs the script of the documentation twice, which gets SIGTERM after three steps each."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(2):
            with script("dp2-tp1-pp1") as run:

                def batches(run: Script = run) -> Iterator[Any]:
                    for number, batch in enumerate(run.loader):
                        if number == 2 and run.fabric.global_rank == 0:
                            os.kill(os.getpid(), signal.SIGTERM)
                        yield batch

                names = {
                    "fabric": run.fabric,
                    "model": run.model,
                    "optimizer": run.optimizer,
                    "scheduler": run.scheduler,
                    "copus": run.callback,
                    "loader": batches(),
                }
                exec(block, names)
        last = newest("checkpoints")
        return names["state"]["step"], run.callback.controller.step, last == Path("checkpoints/step-00000006")
    finally:
        os.chdir(before)


def test_the_documented_script_saves_when_asked_to_leave_and_goes_on(world: World, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    block = text.split("```python\n")[1].split("```")[0]
    assert world.run(as_documented, str(tmp_path), block, ranks=2) == [(6, 6, True)] * 2
