"""A switch happens wholly or not at all; a step that runs out of memory is rerun; nothing hangs."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from world import World

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine.engine import Engine, OutOfMemory, StepFailed, SwitchFailed
from copus_lightning.engine.memory import Sizes, switch_peak_bytes, way_back_bytes
from copus_lightning.engine.switching import OVERLAPPED, PHASES

from . import tiny
from .tiny import N_SAMPLES

DP2PP2, TP2PP2, PP4, DP4 = Layout(2, 1, 2), Layout(1, 2, 2), Layout(pipeline=4), Layout(data=4)


def failing(
    engine: Engine, phase: str, rank: int, error: type[BaseException] = MemoryError, time: int = 1
) -> None:
    """Lets one phase fail on one rank, once: the ``time``-th time that it is entered."""
    entered = 0

    def fault(name: str) -> None:
        nonlocal entered
        entered += name == phase
        if name == phase and entered == time and engine.rank == rank:
            engine.fault = lambda _: None
            raise error("injected")

    engine.fault = fault


def try_switch(engine: Engine, target: Layout, in_advance: bool = False) -> str | None:
    """The reason why a switch failed, or None."""
    configuration = Configuration(target, N_SAMPLES, 2)
    try:
        if in_advance:
            engine.prepare(configuration)
        engine.switch(configuration)
    except SwitchFailed as failed:
        return failed.reason
    finally:
        engine.fault = lambda _: None
    return None


def fail_in_every_phase(zero_stage: int, dtype: torch.dtype) -> list[tuple[str, str | None, list[str]]]:
    """For each phase: the reason, and what of the state has changed; training goes on after each."""
    found = []
    with tiny.running(DP2PP2, micro_batch_size=2, zero_stage=zero_stage, dtype=dtype) as engine:
        tiny.train(engine, [tiny.make_batch()])
        for index, phase in enumerate(PHASES):
            before = tiny.state(engine)
            failing(engine, phase, rank=1 + index % 3)
            reason = try_switch(engine, TP2PP2, in_advance=index % 2 == 0)
            found.append((phase, reason, tiny.differences(before, tiny.state(engine))))
            assert engine.layout == DP2PP2
            tiny.train(engine, [tiny.make_batch(seed=index)])
        assert try_switch(engine, TP2PP2) is None, "in the end it works"
        tiny.train(engine, [tiny.make_batch()])
    return found


@pytest.mark.parametrize(("zero_stage", "dtype"), [(1, torch.bfloat16), (0, torch.float32)])
def test_a_failure_in_any_phase_brings_all_ranks_back(
    world: World, zero_stage: int, dtype: torch.dtype
) -> None:
    by_rank = world.run(fail_in_every_phase, zero_stage, dtype, timeout=240)
    assert all(found == by_rank[0] for found in by_rank), "all ranks give the same reason"
    for index, (phase, reason, changed) in enumerate(by_rank[0]):
        assert reason is not None and "\n" not in reason
        assert f"rank {1 + index % 3} failed" in reason and "injected" in reason
        assert ("drain" if phase in OVERLAPPED else phase) in reason
        assert changed == [], f"{phase}: the old state is back bit for bit"


def fail_between_states(dtype: torch.dtype) -> list[tuple[str, str | None, list[str]]]:
    """As above with states that travel one by one, each freed where it was: masters and two moments, then the end."""
    found = []
    places = [("exchange", 1), ("exchange", 2), ("exchange", 3), ("load", 1)]
    with tiny.running(DP2PP2, micro_batch_size=2, dtype=dtype, one_by_one=True) as engine:
        tiny.train(engine, [tiny.make_batch()])
        for index, (phase, time) in enumerate(places):
            before = tiny.state(engine)
            failing(engine, phase, rank=(3 + index) % 4, time=time)
            reason = try_switch(engine, TP2PP2 if index % 2 else PP4, in_advance=index % 2 == 0)
            found.append((f"{phase} {time}", reason, tiny.differences(before, tiny.state(engine))))
            tiny.train(engine, [tiny.make_batch(seed=index)])
        before = tiny.state(engine)
        assert try_switch(engine, TP2PP2) is None, "in the end it works"
        assert tiny.differences(before, tiny.state(engine)) == []
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_freed_already_travels_back(world: World, dtype: torch.dtype) -> None:
    by_rank = world.run(fail_between_states, dtype, timeout=240)
    assert all(found == by_rank[0] for found in by_rank), "all ranks give the same reason"
    for index, (place, reason, changed) in enumerate(by_rank[0]):
        assert reason is not None and f"rank {(3 + index) % 4} failed in phase '{place.split()[0]}'" in reason
        assert changed == [], f"{place}: the old state is back bit for bit"


def fail_with_groups_apart() -> tuple[list[str | None], str]:
    """Groups are made by one rank more than by others before a switch fails; then even the way back fails."""
    reasons = []
    with tiny.running(DP2PP2, micro_batch_size=2) as engine:
        tiny.train(engine, [tiny.make_batch()])
        for phase in ("prepare", "exchange"):
            if engine.rank == 1:
                dist.distributed_c10d._world.group_count += 1
            failing(engine, phase, rank=2)
            reasons.append(try_switch(engine, TP2PP2))
            reasons.append(try_switch(engine, TP2PP2))
            reasons.append(try_switch(engine, DP2PP2))
            tiny.train(engine, [tiny.make_batch()])

        prepare = engine.assembler.prepare

        def fail_again(groups: Any) -> Any:
            if groups.layout == DP2PP2 and engine.rank == 3:
                raise MemoryError("no room for the old layout")
            return prepare(groups)

        failing(engine, "build", rank=0)
        engine.assembler.prepare = fail_again  # type: ignore[method-assign]
        try:
            engine.switch(Configuration(TP2PP2, N_SAMPLES, 2))
        except StepFailed as failed:
            return reasons, failed.reason
        return reasons, "nothing was raised"


def test_a_failure_leaves_the_ranks_with_groups_alike(world: World) -> None:
    for reasons, lost in world.run(fail_with_groups_apart, timeout=120):
        assert [reason is None for reason in reasons] == [False, True, True] * 2
        assert lost.startswith("rank 3 could not take dp2-tp1-pp2") and "no room for the old layout" in lost


def sizes_of_a_switch(one_by_one: bool) -> tuple[int, int, int, int]:
    """Bytes of one state key before and after, what the switch had at most at a time, and the buffer."""
    with tiny.running(
        PP4, micro_batch_size=2, zero_stage=0, one_by_one=one_by_one, buffer_bytes=4096
    ) as engine:
        tiny.train(engine, [tiny.make_batch()])
        before, after = (engine.assembler.sizes(layout, True) for layout in (PP4, DP4))
        report = engine.switch(Configuration(DP4, N_SAMPLES, 2))
        masters = sum(piece["master"].numel() * 4 for piece in engine.live.storages(("master",)).by_piece)
        assert (before.n_keys, after.n_keys, after.state) == (3, 3, masters)
        return before.state, after.state, report.state_bytes, engine.settings.buffer_bytes


def test_one_by_one_two_layouts_never_stand_side_by_side(world: World) -> None:
    for before, after, peak, buffer in world.run(sizes_of_a_switch, False):
        assert peak == 3 * before + 3 * after + buffer
    for before, after, peak, buffer in world.run(sizes_of_a_switch, True):
        assert peak == max(3 * before + after, before + 3 * after) + buffer


def test_what_a_switch_needs_of_a_device() -> None:
    before, after = Sizes(weights=60, state=40, n_keys=3), Sizes(weights=15, state=10, n_keys=3)
    assert switch_peak_bytes(before, after, one_by_one=False) == 15 + 30 + 120
    assert switch_peak_bytes(before, after, one_by_one=True) == 15 + 120 + 10
    assert switch_peak_bytes(after, before, one_by_one=True) == 60 + 10 + 120
    # Back: the new weights and masters beside the three keys that are held; in fp32 the old weights are held, too.
    assert way_back_bytes(before, masters_are_weights=False) == 60 + 40 + 120
    assert way_back_bytes(before, masters_are_weights=True) == 60 + 40 + 120 + 30


def corrupt_a_piece() -> tuple[str | None, list[str], str | None]:
    with tiny.running(DP2PP2, micro_batch_size=2) as engine:
        tiny.train(engine, [tiny.make_batch()])
        before = tiny.state(engine)

        def tamper(message: torch.Tensor) -> None:
            if engine.rank == 2:
                message[len(message) // 2] += 1e-3

        engine.tamper = tamper
        reason = try_switch(engine, PP4)
        engine.tamper = None
        return reason, tiny.differences(before, tiny.state(engine)), try_switch(engine, PP4)


def test_a_piece_that_arrives_corrupted_is_found_by_its_checksum(world: World) -> None:
    reason, changed, after = world.run(corrupt_a_piece)[0]
    assert reason is not None and "from rank 2 arrived corrupted" in reason
    assert changed == [] and after is None


def prepared_while_training() -> tuple[bool, list[float], list[float]]:
    """Steps between the decision and the switch, against a run that switches at once."""
    batches = [tiny.make_batch(seed=s) for s in range(4)]
    curves = []
    for in_advance in (True, False):
        with tiny.running(DP4, micro_batch_size=2) as engine:
            if in_advance:
                engine.prepare(Configuration(PP4, N_SAMPLES, 2))
            losses = tiny.train(engine, batches[:2])
            started = perf_counter()
            report = engine.switch(Configuration(PP4, N_SAMPLES, 2))
            assert 0 < report.total_seconds < perf_counter() - started
            curves.append((report.overlapped, losses + tiny.train(engine, batches[2:]), report))
    (ahead, one, report), (at_once, other, whole) = curves
    assert list(report.seconds) == list(whole.seconds) == list(PHASES)
    parts = sum(report.seconds[p] for p in PHASES if p not in OVERLAPPED)
    assert math.isclose(parts, report.total_seconds)
    assert math.isclose(sum(whole.seconds.values()), whole.total_seconds)
    return ahead and not at_once, one, other


def test_a_prepared_switch_is_the_same_switch(world: World) -> None:
    ok, one, other = world.run(prepared_while_training)[0]
    assert ok and one == other


def slow_phases() -> tuple[dict[str, float], float, float]:
    """Seconds of a switch, every phase of which takes at least 0.02 s: of each phase, of all, seen from outside."""
    with tiny.running(DP4, micro_batch_size=2) as engine:
        engine.fault = lambda _: sleep(0.02)
        started = perf_counter()
        report = engine.switch(Configuration(PP4, N_SAMPLES, 2))
        return report.seconds, report.total_seconds, perf_counter() - started


def test_the_phases_of_a_switch_sum_to_the_whole(world: World) -> None:
    for seconds, total, outside in world.run(slow_phases):
        assert list(seconds) == list(PHASES) and min(seconds.values()) >= 0.02
        assert sum(seconds.values()) == pytest.approx(total) and total < outside


# -- memory ------------------------------------------------------------------------------------------------


def out_of_memory(layout: Layout, on_rank: int) -> tuple[list[float], list[float], list[Any]]:
    """Losses of a run that runs out of memory in its second step, and of one that began with less."""
    batches = [tiny.make_batch("uneven", seed=s) for s in range(4)]
    curves = []
    reductions: list[Any] = []
    for micro in (4, 2):
        with tiny.running(layout, micro_batch_size=micro) as engine:
            losses = tiny.train(engine, batches[:1])
            if micro == 4:
                failing(engine, "micro-batch", on_rank, torch.OutOfMemoryError)
            losses += tiny.train(engine, batches[1:])
            curves.append(losses)
            reductions += [(str(r.configuration), str(r.replacement), r.reason) for r in engine.reductions]
            assert engine.configuration == Configuration(layout, N_SAMPLES, 2)
    return curves[0], curves[1], reductions


@pytest.mark.parametrize(("layout", "on_rank"), [(DP2PP2, 3), (TP2PP2, 0)], ids=str)
def test_a_step_that_runs_out_of_memory_is_rerun_with_a_smaller_micro_batch(
    world: World, layout: Layout, on_rank: int
) -> None:
    for reduced, small, reductions in world.run(out_of_memory, layout, on_rank):
        # The first step of the first run was made with larger micro-batches: the same but for rounding.
        assert max(abs(a - b) for a, b in zip(reduced, small, strict=True)) < 1e-5
        ((before, after, reason),) = reductions
        assert before == f"{layout} batch 8 micro-batch 4" and after == f"{layout} batch 8 micro-batch 2"
        assert f"rank {on_rank} ran out of memory" in reason


def out_of_memory_at_one() -> str:
    with tiny.running(DP2PP2, micro_batch_size=1) as engine:
        failing(engine, "micro-batch", 1, torch.OutOfMemoryError)
        try:
            tiny.train(engine, [tiny.make_batch()])
        except OutOfMemory as error:
            tiny.train(engine, [tiny.make_batch()])  # the engine is as it was
            return error.reason
    return ""


def test_a_micro_batch_of_one_that_does_not_fit_is_an_error_on_all_ranks(world: World) -> None:
    for reason in world.run(out_of_memory_at_one):
        assert "the micro-batch is 1 already" in reason and "\n" not in reason


def fail_in_step() -> str:
    with tiny.running(PP4, micro_batch_size=2) as engine:
        failing(engine, "micro-batch", 2, KeyError)
        try:
            tiny.train(engine, [tiny.make_batch()])
        except StepFailed as error:
            return error.reason
    return ""


def test_another_error_in_a_step_ends_it_on_all_ranks(world: World) -> None:
    for reason in world.run(fail_in_step):
        assert "rank 2 failed in the step: KeyError" in reason


# -- leaks -------------------------------------------------------------------------------------------------


def left_of_the_old_layout(settings: dict[str, Any]) -> list[str]:
    """What of a layout is still there right after a switch, before any garbage collector comes along."""
    with tiny.running(DP2PP2, micro_batch_size=2, **settings) as engine:
        tiny.train(engine, [tiny.make_batch()])
        old = engine.live
        assert old is not None
        kept = {"layout": old, "engine": old.engine, "module": old.engine.module, "optimizer": old.optimizer}
        kept |= {f"weight {name}": weight for name, weight in old.optimizer.parameters.items()}
        if old.optimizer.flat is not None:
            flat = old.optimizer.flat
            kept |= {
                "masters": flat.fp32_groups_flat_partition[0],
                "gradients": flat.fp32_groups_gradients_flat[0],
            }
        else:
            kept["moment"] = old.storages(("exp_avg",)).by_piece[0]["exp_avg"]._base
        watched = {name: weakref.ref(thing) for name, thing in kept.items()}
        del old, kept
        gc.collect()
        gc.disable()
        try:
            engine.switch(Configuration(PP4, N_SAMPLES, 2))
            return [name for name, thing in watched.items() if thing() is not None]
        finally:
            gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_the_old_layout_is_freed_at_once(world: World, zero_stage: int, dtype: torch.dtype) -> None:
    for left in world.run(left_of_the_old_layout, {"zero_stage": zero_stage, "dtype": dtype}):
        assert left == []


def left_of_a_failed_preparation() -> tuple[str | None, list[str]]:
    """The reason, and which weights of the layout that could not be prepared are still alive."""
    with tiny.running(DP4, micro_batch_size=2) as engine:
        tiny.train(engine, [tiny.make_batch()])
        allocate = engine.assembler.allocate
        watched: dict[str, Any] = {}

        def without_room(prepared: Any, with_state: bool) -> None:
            allocate(prepared, with_state)
            watched.update({n: weakref.ref(p) for n, p in prepared.engine.module.named_parameters()})
            raise MemoryError("injected")

        engine.assembler.allocate = without_room  # type: ignore[method-assign]
        reason = try_switch(engine, PP4)
        del engine.assembler.allocate  # type: ignore[method-assign]
        tiny.train(engine, [tiny.make_batch()])
        gc.collect()
        assert watched
        return reason, [name for name, parameter in watched.items() if parameter() is not None]


def test_a_layout_that_could_not_be_prepared_leaves_nothing_behind(world: World) -> None:
    for reason, left in world.run(left_of_a_failed_preparation):
        assert reason is not None and "injected" in reason and left == []


def many_switches(n: int) -> dict[str, list[int]]:
    """Groups, threads, descriptors and resident memory after the third switch and at the end."""
    layouts = [DP4, Layout(2, 2, 1), DP2PP2, PP4]
    process = psutil.Process()
    measures: dict[str, Callable[[], int]] = {
        "groups": lambda: len(dist.distributed_c10d._world.pg_map),
        "threads": process.num_threads,
        "descriptors": process.num_fds,
        "resident": lambda: process.memory_info().rss,
    }
    found: dict[str, list[int]] = {name: [] for name in measures}
    with tiny.running(PP4, micro_batch_size=2) as engine:
        tiny.train(engine, [tiny.make_batch()])
        for index in range(n):
            configuration = Configuration(layouts[index % len(layouts)], N_SAMPLES, 2)
            if index % 2:
                engine.prepare(configuration)
            engine.switch(configuration)
            if index % 20 == 0:
                tiny.train(engine, [tiny.make_batch()])
            if index in (3, n - 1):
                gc.collect()
                dist.barrier()
                for name, measure in measures.items():
                    found[name].append(measure())
    return found


def test_nothing_grows_over_200_switches(world: World) -> None:
    for rank, found in enumerate(world.run(many_switches, 200, timeout=300)):
        for name in ("groups", "threads", "descriptors"):
            early, late = found[name]
            assert early == late, f"rank {rank}: {name} {early} -> {late}"
        early, late = found["resident"]
        assert late <= 1.02 * early, f"rank {rank}: resident memory {early} -> {late}"
