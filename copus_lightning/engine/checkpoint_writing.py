"""One checkpoint being written, by all ranks together, in the foreground or in a helper thread."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine.checkpoint_format import Manifest
from copus_lightning.engine.checkpoint_planners import Chunk, SaveChunks
from copus_lightning.engine.failures import Failure, describe

if TYPE_CHECKING:
    from copus_lightning.engine.engine import Engine

T = TypeVar("T")


class Writing:
    """One checkpoint being written, on all ranks at once.

    Attributes:
        state: Contents of the state file, on rank 0.
        manifest: On rank 0, still without its files.
        failure: Why it was not written.
    """

    def __init__(self, engine: Engine, path: Path, chunks: list[Chunk]) -> None:
        self.rank, self.world_size, self.fault = engine.rank, engine.world_size, engine.fault
        self.path, self.chunks, self.device = path, chunks, engine.device
        self.state: io.BytesIO | None = None
        self.manifest: Manifest | None = None
        self.failure: Failure | None = None
        self._group: ProcessGroup | None = None
        self._thread: threading.Thread | None = None

    def start(self, group: ProcessGroup, in_thread: bool) -> None:
        """Writes, now or in a thread.

        Args:
            group: Of all ranks, and nobody else's meanwhile. If this rank fails alone the group is ended and
                forgotten, which closes its connections, so that nobody waits for this rank.
            in_thread: Return at once.
        """
        self._group = group
        del group
        if in_thread:
            # Not a daemon: a script that ends without another word still gets its last checkpoint.
            self._thread = threading.Thread(target=self._run, args=(True,), name="copus-checkpoint")
            self._thread.start()
        else:
            self._run()

    def join(self) -> None:
        """Waits for the thread."""
        if self._thread is not None:
            self._thread.join()

    def return_group(self) -> ProcessGroup | None:
        """Gives the group back, if there still is one."""
        group, self._group = self._group, None
        return group

    def _run(self, log: bool = False) -> None:
        alone = False
        interrupt: BaseException | None = None  # of the user's, in the foreground
        try:
            if self.device.type == "cuda":  # a thread of its own would look at the first one
                torch.cuda.set_device(self.device)
            self._write()
        except CheckpointException as error:  # the same on all ranks, with what each of them met
            rank, (cause, _) = next(iter(error.failures.items()))
            self.failure = describe(cause, rank)
            interrupt = _interrupt(cause)
        except _Failed as error:
            self.failure = error.failure
        except BaseException as error:
            self.failure = describe(error, self.rank)
            alone = True
            interrupt = _interrupt(error)
        self.chunks, self.state = [], None
        if alone:
            self._end_group()
        if interrupt is not None and self._thread is None:
            raise interrupt
        if log and self.failure is not None:  # it may be long until somebody asks, or for ever
            logging.getLogger(__name__).error("checkpoint %s: %s", self.path, self.failure.reason)

    def _end_group(self) -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self.return_group())
        gc.collect()  # DCP's closures hold it too

    def _write(self) -> None:
        self.fault("save: write")
        folder = files.saving(self.path)
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            planner=SaveChunks(self.chunks),
            process_group=self._group,
        )
        self.fault("save: describe")
        written: dict[str, Any] = {}
        for own in self._together(lambda: self._describe_own(folder)):
            written.update(own)
        self.fault("save: complete")
        self._together(lambda: self._complete(folder, written) if self.rank == 0 else None)

    def _describe_own(self, folder: Path) -> dict[str, Any]:
        own = sorted(folder.glob(f"__{self.rank}_*.distcp"))
        return {path.name: files.describe_file(path) for path in own}

    def _complete(self, folder: Path, written: dict[str, Any]) -> None:
        assert self.state is not None and self.manifest is not None
        files.write_file(folder / files.STATE, self.state.getbuffer())
        for name in (files.STATE, files.METADATA):
            written[name] = files.describe_file(folder / name)
        self.manifest.files.update(dict(sorted(written.items())))
        try:
            files.check_files(folder, self.manifest, share=-1)
        except ValueError as error:
            raise RuntimeError(f"{error} (do all ranks see the same file system?)") from None
        self.manifest.write(folder)
        files.complete(self.path, lambda: self.fault("save: between"))

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What the work gave on each rank; raises on all ranks if it failed on one."""
        outcome: tuple[Any, Failure | None]
        try:
            outcome = work(), None
        except Exception as error:
            outcome = None, describe(error, self.rank)
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, outcome, group=self._group)
        failed = [failure for _, failure in everyone if failure is not None]
        if failed:
            raise _Failed(failed[0])
        return [result for result, _ in everyone]


def _interrupt(error: BaseException) -> BaseException | None:
    return None if isinstance(error, Exception) else error


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure
