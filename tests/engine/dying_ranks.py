"""Worlds in which one rank is killed, each of four processes of its own."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from world import begin_fork, forks

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine import checkpoint_format
from copus_lightning.engine.checkpoint import Checkpointer
from copus_lightning.engine.engine import Engine, EngineSettings

from . import tiny

WORLD_SIZE, TIMEOUT_SECONDS, LIMIT_SECONDS = 4, 8.0, 60.0


def run_rank(rank: int, phase: str, victim: int, folder: Path) -> dict[str, Any]:
    """Trains, switches or saves, and dies or tells how the end came."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, store=store)
    model = tiny.UNTIED.build()
    optimizer = tiny.make_optimizer("adamw", model)
    engine = Engine(
        model,
        optimizer,
        Configuration(Layout(2, 1, 2), tiny.N_SAMPLES, 2),
        EngineSettings(timeout_seconds=TIMEOUT_SECONDS),
        torch.device("cpu"),
    )
    tiny.train(engine, [tiny.make_batch()])
    saves = phase.startswith("save")
    checkpointer, path = Checkpointer(engine), folder / "checkpoints" / "last"
    if saves:
        checkpointer.save(path, labels={"number": 1})

    def fault(name: str) -> None:
        if name == phase and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.fault = fault
    started = time.monotonic()
    try:
        tiny.train(engine, [tiny.make_batch()])
        if saves:
            checkpointer.save(path, labels={"number": 2})
        engine.switch(Configuration(Layout(1, 2, 2), tiny.N_SAMPLES, 2))
        for _ in range(3):
            tiny.train(engine, [tiny.make_batch()])
    except Exception as error:
        return {"error": type(error).__name__, "reason": str(error), "seconds": time.monotonic() - started}
    return {"error": None, "reason": "", "seconds": time.monotonic() - started}


def be_rank(rank: int, phase: str, victim: int, folder: Path) -> None:
    """A rank's process: leaves a report in the folder, unless it dies."""
    begin_fork()
    try:
        result = run_rank(rank, phase, victim, folder)
        (folder / f"{rank}.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # as abruptly as a script that ends with an error: no shutdown of groups


def outcomes(scenarios: Mapping[str, int]) -> dict[str, Any]:
    """By the phase in which a rank dies: what each surviving rank reports.

    A scenario begins once the victim of the one before is dead: then the survivors of that only wait.
    """
    context = forks()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(scenarios)) as executor:
        ends = {}
        for number, (phase, victim) in enumerate(scenarios.items()):
            folder = Path(name, str(number))
            folder.mkdir()
            ranks = [
                context.Process(target=be_rank, args=(rank, phase, victim, folder), daemon=True)
                for rank in range(WORLD_SIZE)
            ]
            for process in ranks:
                process.start()
            deadline = time.monotonic() + LIMIT_SECONDS
            ranks[victim].join(LIMIT_SECONDS)
            ends[phase] = executor.submit(outcome, ranks, deadline, folder)
        return {phase: end.result() for phase, end in ends.items()}


def outcome(ranks: list[Any], deadline: float, folder: Path) -> dict[str, Any]:
    """Waits for the end of a world, and gathers what the survivors report."""
    hung = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while hung and (ended := wait(list(hung), max(deadline - time.monotonic(), 0.0))):
        for sentinel in ended:
            del hung[sentinel]
    for rank in hung.values():
        ranks[rank].kill()
    for process in ranks:
        process.join()
    files = {rank: folder / f"{rank}.json" for rank in range(WORLD_SIZE)}
    reports = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    whole = checkpoint_format.newest(folder / "checkpoints")
    number = None
    if whole is not None:
        read = checkpoint_format.resolve(whole)
        manifest = checkpoint_format.Manifest.read(read)
        checkpoint_format.check_files(read, manifest)
        number = manifest.labels["number"]
    return {
        "exit_codes": [process.exitcode for process in ranks],
        "hung": sorted(hung.values()),
        "reports": reports,
        "checkpoint": number,
    }
