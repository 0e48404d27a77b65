"""One long-lived world of gloo processes, for every test that needs several ranks.

Starting processes and importing torch, DeepSpeed and Transformers anew for each test is what makes such
suites slow; here one process imports them once per session, the ranks are forks of it, and a test hands over a
function:

    def squares(factor):                     # at the top level of the test module
        return factor * dist.get_rank() ** 2

    def test_squares(world):
        assert world.run(squares, 10) == [0, 10, 40, 90]

A rank imports the function by name, so it must be at the top level of a module on the test process's path.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
"""Longest start of the processes; their imports take some ten seconds on two idle cores."""

GRACE_SECONDS = 5.0
"""How long other ranks may go on after one has failed, before they are taken to wait for it."""

PRELOAD = (
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # with torch's compiler
    "torchmetrics",
    "transformers.models.llama.modeling_llama",
)

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""Of the processes, from their first import on."""


class WorldError(RuntimeError):
    """The world was lost: a rank exited, or time ran out. It starts anew with the next use."""


class RemoteTraceback(Exception):
    """Where on its rank an error was raised; the cause of the error that `World.run` raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def forks(preload: tuple[str, ...] = PRELOAD) -> Any:
    """A context of `multiprocessing` whose processes are forks of one that has imported `preload`.

    That one starts with the first use in a session, whose `preload` counts, and ends with the session. It has
    opened nothing, and has one thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *preload])
    with _environment_of(ENVIRONMENT):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment_of(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class World:
    """Processes that run functions as the ranks of a gloo world.

    They start with the first call. Ranks keep their process group from call to call; a call with fewer ranks,
    and the first one after a failure, makes a new one.

    Args:
        size: Number of processes, and of ranks where a call does not say otherwise.
        preload: Modules that the processes import when they start, so that no test's time limit covers it.
    """

    def __init__(self, size: int = 4, preload: tuple[str, ...] = PRELOAD) -> None:
        self.size, self.preload = size, preload
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store: Any = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._generation, self._ranks = 0, size

    @property
    def alive(self) -> bool:
        """Whether the processes run."""
        return bool(self._processes)

    @property
    def process_ids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 120.0
    ) -> list[Any]:
        """Calls `function(*args)` on every rank, and returns what it returns, by rank.

        Args:
            function: At the top level of its module.
            args: Pickled to every rank.
            ranks: Size of the world that the function sees; all processes if None.
            timeout: Seconds after which the whole world is killed.

        Raises:
            Exception: What the first rank to fail raised, with its traceback there as the cause.
            WorldError: A rank exited, or time ran out; the message has the stacks of all ranks.
        """
        assert "<locals>" not in function.__qualname__, f"{function.__qualname__} is not at the top level"
        ranks = self.size if ranks is None else ranks
        if not self.alive:
            self._start()
        if ranks != self._ranks:
            self._generation, self._ranks = self._generation + 1, ranks
        group = (f"generation{self._generation}", ranks)
        call = (function.__module__, function.__qualname__, args)
        request = pickle.dumps((sys.path, group, pickle.dumps(call)))
        return self._ask(request, ranks, timeout, f"{function.__module__}.{function.__qualname__}")

    def problems(self) -> list[str]:
        """What a test has left behind on the ranks, one line each: a live engine, groups, environment."""
        if not self.alive:
            return []
        found = self.run(leftovers, ranks=self._ranks)
        lines = [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]
        if lines:
            self._generation += 1
        return lines

    def close(self) -> None:
        """Ends the processes; a later call would start others."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    # -- processes -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._directory = tempfile.TemporaryDirectory(prefix="world")
        self._generation, self._ranks = self._generation + 1, self.size
        atexit.register(self.close)
        context = forks(self.preload)
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            place = (rank, self.preload, self._store.port, self._directory.name)
            # Not daemonic: daemons may not have children, and a DataLoader's workers are children.
            process = context.Process(target=_serve, args=(theirs, *place), name=f"rank{rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        self._ask(None, self.size, START_SECONDS, "the start of the processes")

    def _ask(self, request: bytes | None, ranks: int, timeout: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        failure: tuple[int, Exception] | None = None
        try:
            for connection in self._connections[:ranks] if request is not None else []:
                with contextlib.suppress(BrokenPipeError):  # a dead rank is named below
                    connection.send_bytes(request)
            deadline = time.monotonic() + timeout
            while len(results) < ranks:
                waiting = {self._connections[rank]: rank for rank in range(ranks) if rank not in results}
                ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
                if not ready:
                    if failure is not None:  # the others wait for the one that failed
                        self.close()
                        raise failure[1]
                    stacks = self._stacks(sorted(waiting.values()))
                    self.close()
                    raise WorldError(f"{what} took longer than {timeout:g} s; it was in\n{stacks}")
                for rank in sorted(waiting[connection] for connection in ready):
                    try:
                        succeeded, value = pickle.loads(self._connections[rank].recv_bytes())
                    except (EOFError, ConnectionError):
                        self._processes[rank].join(GRACE_SECONDS)
                        code = self._processes[rank].exitcode
                        self.close()
                        raise WorldError(f"rank {rank} exited with code {code} in {what}") from None
                    results[rank] = value
                    if not succeeded and failure is None:
                        failure = (rank, value)
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        except (KeyboardInterrupt, SystemExit):
            self.close()
            raise
        if failure is not None:
            self._generation += 1  # whatever the failure left behind goes with its groups
            raise failure[1]
        return [results[rank] for rank in range(ranks)]

    def _stacks(self, ranks: list[int]) -> str:
        assert self._directory is not None
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        files = {rank: Path(self._directory.name, f"rank{rank}") for rank in ranks}
        return "\n".join(f"rank {rank}: {file.read_text()}" for rank, file in files.items() if file.exists())


# -- on a rank ---------------------------------------------------------------------------------------------


def _serve(connection: Connection, rank: int, preload: tuple[str, ...], port: int, directory: str) -> None:
    begin_fork()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process ends the world
    stacks = Path(directory, f"rank{rank}").open("w")  # noqa: SIM115  (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    # As under torchrun, for Lightning's and DeepSpeed's sake.
    os.environ |= ENVIRONMENT
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "world"}
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        import torch

        torch.set_num_threads(1)
        for module in preload:
            importlib.import_module(module)
        gc.freeze()
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        answer = pickle.dumps((True, None))
    except Exception as error:
        answer = _failure(error)
    connection.send_bytes(answer)
    entered = ""
    while True:
        try:
            path, group, call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            sys.path[:] = path
            if group[0] != entered:
                entered = ""
                _enter(store, *group, rank)
                entered = group[0]
            module, name, args = pickle.loads(call)
            random.seed(0)
            torch.manual_seed(0)
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = pickle.dumps((True, function(*args)))
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            answer = _failure(error)
        connection.send_bytes(answer)


def begin_fork() -> None:
    """Makes a fork like an interpreter of its own, which ends with the test process, however that ends."""
    import numpy as np

    np.random.seed()  # Python's generator sees to that itself
    gc.freeze()  # what was imported is for ever: collecting garbage need not walk through it
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _failure(error: BaseException) -> bytes:
    """An error as an answer: itself if it can be pickled, with its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        same = pickle.loads(pickle.dumps(error))
        assert type(same) is type(error)
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
    return pickle.dumps((False, _Raised(same, text)))


class _Raised:
    """Pickles as its error, with the traceback as the error's cause."""

    def __init__(self, error: BaseException, text: str) -> None:
        self.error, self.text = error, text

    def __reduce__(self) -> Any:
        return _with_cause, (self.error, self.text)


def _with_cause(error: BaseException, text: str) -> BaseException:
    error.__cause__ = RemoteTraceback(text)
    return error


def _enter(store: Any, name: str, size: int, rank: int) -> None:
    """Leaves the present world and all that is left of it, and enters one of `size` ranks."""
    import torch.distributed as dist

    if "deepspeed" in sys.modules:
        from deepspeed.comm import comm
        from deepspeed.module_inject.layers import set_autotp_mode
        from deepspeed.runtime.pipe import p2p
        from deepspeed.utils import groups

        groups.mpu, p2p._grid, comm.cdb = None, None, None
        set_autotp_mode(training=False)
    if dist.is_initialized():
        dist.destroy_process_group()
    if _environment:
        os.environ.clear()
        os.environ.update(_environment)
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    place = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=place, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    _environment.clear()
    _environment.update(os.environ)


_environment: dict[str, str] = {}
"""On a rank: the environment with which it entered its world."""

_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}
"""Variables that torch itself sets on first use of something."""


def leftovers() -> list[str]:
    """What is alive or changed on this rank that a test should have ended or restored."""
    import torch.distributed as dist

    lines = []
    if "deepspeed" in sys.modules:
        from deepspeed.runtime.pipe import p2p
        from deepspeed.utils import groups

        if groups.mpu is not None or p2p._grid is not None:
            lines.append("an engine is alive: close() it")
    if (n := len(dist.distributed_c10d._world.pg_map)) > 1:
        lines.append(f"{n - 1} process groups are alive besides the world's")
    names = (_environment.keys() | os.environ.keys()) - _SET_BY_TORCH
    changed = sorted(name for name in names if _environment.get(name) != os.environ.get(name))
    if changed:
        lines.append(f"environment variables differ: {', '.join(changed)}")
    return lines
