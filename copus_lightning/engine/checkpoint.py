"""Saves and loads the state of a run, free of any layout: what is written in one is read in any other.

Masters, moments and the rest are described in :mod:`checkpoint_format`. Low-precision weights are not stored: they
are recast from the masters.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine import generators
from copus_lightning.engine.boxes import Box, needed_boxes, saved_boxes
from copus_lightning.engine.checkpoint_contents import check_fits, describe_run, read_state
from copus_lightning.engine.checkpoint_format import Manifest
from copus_lightning.engine.checkpoint_planners import Chunk, read_chunks
from copus_lightning.engine.checkpoint_writing import Writing
from copus_lightning.engine.failures import CollectiveError, Failure, causes, describe
from copus_lightning.engine.optimizer import MASTER, OptimizerHandle

if TYPE_CHECKING:
    from copus_lightning.engine.assembly import Live
    from copus_lightning.engine.engine import Engine

T = TypeVar("T")
_REFUSED, _NO_SUCH_ENTRY = "refused", "no such entry"


class CheckpointFailed(CollectiveError):
    """A checkpoint could not be written or read, on some rank. The one before is intact, the run can go on."""


REFUSALS = (ValueError, KeyError, CheckpointFailed)
"""What a load raises on all ranks alike, with nothing overwritten."""


class Checkpointer:
    """Saves and loads for one engine. Collective, like the engine.

    Args:
        engine: Whose state it is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._own_group: ProcessGroup | None = None
        self._writing: Writing | None = None

    # -- save --------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any] | None = None,
        *,
        optimizer: bool = True,
        labels: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Writes a checkpoint folder, between two steps. It appears whole or not at all.

        Args:
            path: The folder; rank 0's counts. All ranks must see the same file system. A checkpoint that is there
                is replaced once the new one is complete.
            state: Whatever else is to be kept, of rank 0; anything that ``torch.save`` takes.
            optimizer: False: the weights alone.
            labels: Plain values for the manifest, where they can be read without loading.
            asynchronous: Copy this rank's pieces to host memory, and write them in a helper thread while training
                goes on. What is saved is the state at the call. An error is raised by the next call of
                :meth:`save`, :meth:`load`, :meth:`wait` or :meth:`close`.

        Raises:
            ValueError: Something else is in the way.
            CheckpointFailed: A rank could not write.
            RankLost: A rank is gone.
        """
        self.wait()
        self._between_steps("saved")
        engine = self.engine
        target, everyone = self._agreed("save: gather", lambda: self._gathered(path), communicates=True)
        scalars: dict[int, dict[str, Any]] = {}
        if optimizer:
            scalars = self._agreed("save: scalars", lambda: engine.assembler.gather_scalars(self._live))

        def stage() -> Writing:
            engine.fault("save: stage")
            if engine.rank == 0:
                files.begin(target)
            writing = Writing(engine, target, self._chunks_to_save(bool(scalars), asynchronous))
            if engine.rank == 0:
                content: dict[str, Any] = {"state": dict(state or {}), "generators": everyone}
                if optimizer:
                    content["optimizer"] = {"scalars": scalars, "hyperparameters": self._hyperparameters()}
                writing.state = io.BytesIO()
                torch.save(content, writing.state)
                writing.manifest = describe_run(
                    engine, scalars if optimizer else None, labels or {}, files.last_saved_at(target.parent)
                )
            return writing

        try:
            self._writing = self._agreed("save: stage", stage)
        except Exception:
            if engine.rank == 0:
                files.abandon(target)
            raise
        self._writing.start(self._hand_over_group(), in_thread=asynchronous)
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits for an asynchronous save to end.

        Raises:
            CheckpointFailed: It failed on some rank.
            RankLost: A rank is gone.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join()
        self._own_group = writing.return_group()
        failures = self.engine.agreement.agree("save: write", writing.failure)
        if failures:
            self._end_group()
            if self.engine.rank == 0:
                files.abandon(writing.path)
            first = causes(failures)[0]
            raise CheckpointFailed(
                f"checkpoint {writing.path} was not written, rank {first.rank} failed: {first.reason}; an earlier one "
                "in its place is intact"
            )

    def close(self) -> None:
        """Waits for an asynchronous save, and ends what was made here."""
        try:
            self.wait()
        finally:
            self._end_group()

    def _gathered(self, path: str | os.PathLike[str]) -> tuple[Path, list[Any] | None]:
        """Where to write, and on rank 0 the random generators of all ranks."""
        engine = self.engine
        target = self._from_first(lambda: files.absolute(path))
        everyone: list[Any] | None = [None] * engine.world_size if engine.rank == 0 else None
        dist.gather_object(generators.capture(engine.device), everyone, dst=0, group=self._group)
        return target, everyone

    def _chunks_to_save(self, with_state: bool, copy: bool) -> list[Chunk]:
        live = self._live
        storages = live.storages(self._handle.all_keys(with_state)).by_piece
        chunks = []
        for box in saved_boxes(live.state_map, live.layout, live.rank):
            for key, storage in storages[box.piece].items():
                memory = storage.detach()[box.start : box.stop].view(box.sizes)
                chunks.append(self._chunk(box, key, memory.to("cpu", copy=True) if copy else memory))
        return chunks

    def _chunk(self, box: Box, key: str, memory: torch.Tensor) -> Chunk:
        tensor = self._live.state_map.tensors[box.tensor]
        name = tensor.name if key == MASTER else files.moment_key(key, tensor.name)
        return Chunk(name, tensor.shape, box.offsets, memory)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        groups = self._handle.optimizer.param_groups
        return [self._handle.hyperparameters(index) for index in range(len(groups))]

    # -- load --------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        check: Callable[[Manifest, dict[str, Any]], None] = lambda manifest, state: None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint into the layout that is alive, whatever it was saved in, between two steps.

        Everything is checked and read before anything is overwritten: after an error the state is as before.

        Args:
            path: The folder; rank 0's counts.
            optimizer: False: the weights alone; moments, hyperparameters and random generators stay.
            check: Called on every rank with the manifest and the saved state; a ``ValueError`` or ``KeyError``
                that it raises is raised on all ranks before anything is overwritten.
            weights_only: As for ``torch.load``, when the saved state is read.

        Returns:
            The saved state.

        Raises:
            ValueError: The checkpoint is not complete, is damaged, or is of another model or optimizer; one line
                that names the file or the key.
            CheckpointFailed: It could not be read for another reason.
            RankLost: A rank is gone.
        """
        self.wait()
        self._between_steps("loaded")
        found = self._agreed(
            "load: path", lambda: self._from_first(lambda: Path(os.path.abspath(path))), communicates=True
        )

        def whole() -> tuple[Path, Manifest]:
            folder = files.resolve(found)
            manifest = Manifest.read(folder)
            files.check_files(folder, manifest, self.engine.rank, self.engine.world_size)
            return folder, manifest

        # Nothing is parsed before all ranks have found their share of the files whole.
        folder, manifest = self._agreed("load: files", whole)

        def fitting() -> dict[str, Any]:
            self.engine.fault("load: check")
            check_fits(self.engine, folder, manifest, optimizer)
            content = read_state(folder, weights_only)
            check(manifest, content["state"])
            return content

        content = self._agreed("load: check", fitting)
        with_state = optimizer and manifest.optimizer is not None and manifest.optimizer["stepped"]
        staged = self._agreed("load: read", lambda: self._read(folder, with_state))
        live = self._live
        with torch.no_grad():
            keys = self._handle.all_keys(with_state)
            for target, source in zip(live.storages(keys).by_piece, staged, strict=True):
                for key, value in source.items():
                    target[key].copy_(value)
        if not optimizer:
            live.optimizer.publish_weights()
            return content["state"]
        if not with_state:
            live.optimizer.torch_optimizer.state.clear()
        self.engine.replaced_state(with_state)
        self.engine.assembler.settle(live, content["optimizer"]["scalars"])
        groups = self._handle.optimizer.param_groups
        for group, saved in zip(groups, content["optimizer"]["hyperparameters"], strict=True):
            group.update(saved)
        generators.restore(content["generators"], self.engine.rank, self.engine.device)
        return content["state"]

    def _read(self, folder: Path, with_state: bool) -> list[dict[str, torch.Tensor]]:
        """What this rank holds, by piece, in host memory."""
        self.engine.fault("load: read")
        live = self._live
        staged = [
            {
                key: torch.empty(piece.numel)
                for key in (self._handle.keys(piece.group) if with_state else (MASTER,))
            }
            for piece in live.pieces
        ]
        chunks = [
            self._chunk(box, key, memory[box.start : box.stop].view(box.sizes))
            for box in needed_boxes(live.state_map, live.layout, live.rank)
            for key, memory in staged[box.piece].items()
        ]
        read_chunks(folder, chunks)
        return staged

    # -- all ranks ---------------------------------------------------------------------------------------------

    @property
    def _handle(self) -> OptimizerHandle:
        return self.engine.assembler.handle

    @property
    def _live(self) -> Live:
        if self.engine.live is None:
            raise RuntimeError("the engine is closed")
        return self.engine.live

    def _between_steps(self, what: str) -> None:
        if self.engine.in_step:
            raise RuntimeError(
                f"a checkpoint cannot be {what} between the model's call and optimizer.step(): do it after "
                "optimizer.zero_grad()"
            )

    @property
    def _group(self) -> ProcessGroup:
        """Of all ranks, used by nothing else: a helper thread talks over it while training goes on."""
        if self._own_group is None:
            self.engine.settle_preparation()
            timeout = timedelta(seconds=self.engine.settings.timeout_seconds)
            self._own_group = dist.new_group(backend="gloo", timeout=timeout)
        return self._own_group

    def _hand_over_group(self) -> ProcessGroup:
        group = self._group
        self._own_group = None
        return group

    def _end_group(self) -> None:
        group, self._own_group = self._own_group, None
        if group is not None:
            dist.destroy_process_group(group)

    def _from_first(self, value: Callable[[], T]) -> T:
        """Rank 0's value; other ranks need not have any."""
        group = self._group  # made by all ranks, before one of them can fail
        box = [value() if self.engine.rank == 0 else None]
        dist.broadcast_object_list(box, 0, group=group)
        return box[0]  # type: ignore[return-value]

    def _agreed(self, phase: str, work: Callable[[], T], communicates: bool = False) -> T:
        """Does a rank's part; if that failed on any rank, all raise the same error.

        Args:
            phase: Its name.
            work: The part.
            communicates: It takes all ranks, over the group of this checkpointer: whoever fails ends the group, so
                that nobody waits for it there.
        """
        result: T | None = None
        failure = None
        try:
            result = work()
        except ValueError as error:
            failure = Failure(self.engine.rank, _REFUSED, str(error))
        except KeyError as error:
            failure = Failure(self.engine.rank, _NO_SUCH_ENTRY, str(error.args[0]))
        except Exception as error:
            failure = describe(error, self.engine.rank)
        if failure is not None and communicates:
            self._end_group()
        failures = self.engine.agreement.agree(phase, failure)
        if failures:
            if communicates:
                self._end_group()
            first = causes(failures)[0]
            if first.kind == _REFUSED:
                raise ValueError(first.reason)
            if first.kind == _NO_SUCH_ENTRY:
                raise KeyError(first.reason)
            raise CheckpointFailed(
                f"rank {first.rank} failed in phase '{phase}' of a checkpoint: {first.reason}"
            )
        return result  # type: ignore[return-value]
