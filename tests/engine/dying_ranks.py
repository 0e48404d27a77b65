"""Worlds in which one rank is killed; run as a script by `test_rank_lost.py`.

Each scenario has its own four processes, forked from this one, which has imported everything but opened nothing:
so a world costs a second instead of ten. Prints one JSON object: by scenario, what each surviving rank reports.
"""

from __future__ import annotations

# ruff: noqa: E402
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import deepspeed.runtime.bf16_optimizer  # noqa: F401
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine import checkpoint_format
from copus_lightning.engine.checkpoint import Checkpointer
from copus_lightning.engine.engine import Engine, EngineSettings
from engine import tiny

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


def scenario(phase: str, victim: int) -> dict[str, Any]:
    """Forks a world, waits for its end, and gathers what the survivors report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = {}
        for rank in range(WORLD_SIZE):
            child = os.fork()
            if child == 0:
                try:
                    result = run_rank(rank, phase, victim, folder)
                    (folder / f"{rank}.json").write_text(json.dumps(result))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)  # as abruptly as a script that ends with an error: no shutdown of groups
            children[child] = rank
        deadline = time.monotonic() + LIMIT_SECONDS
        hung = set(children)
        while hung and time.monotonic() < deadline:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            hung.discard(ended)
            if not ended:
                time.sleep(0.02)
        for child in hung:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        reports = {
            r: json.loads((folder / f"{r}.json").read_text())
            for r in range(WORLD_SIZE)
            if (folder / f"{r}.json").exists()
        }
        whole = checkpoint_format.newest(folder / "checkpoints")
        number = None
        if whole is not None:
            read = checkpoint_format.resolve(whole)
            manifest = checkpoint_format.Manifest.read(read)
            checkpoint_format.check_files(read, manifest)
            number = manifest.labels["number"]
        return {
            "victim": victim,
            "hung": sorted(children[c] for c in hung),
            "reports": reports,
            "checkpoint": number,
        }


if __name__ == "__main__":
    wanted = [argument.rsplit(":", 1) for argument in sys.argv[1:]]
    print(json.dumps({phase: scenario(phase, int(victim)) for phase, victim in wanted}))
