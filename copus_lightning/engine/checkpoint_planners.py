"""How boxes are put into and taken out of PyTorch's distributed checkpoint (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor, and the memory that it is written from or read into.

    Attributes:
        key: Of the tensor.
        shape: Of the whole tensor.
        offsets: Of the box in the whole tensor.
        memory: fp32, of the box's sizes.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    memory: torch.Tensor

    @property
    def storage(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.memory.size())


class SaveChunks(DefaultSavePlanner):
    """Writes this rank's chunks; DCP checks that those of all ranks fill each tensor without overlap."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {(chunk.key, chunk.offsets): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        properties = TensorProperties(dtype=torch.float32)
        items = [
            WriteItem(
                index=MetadataIndex(chunk.key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk.storage, properties, torch.Size(chunk.shape)),
            )
            for chunk in self._chunks.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        offsets = write_item.index.offset
        # A view of a larger storage is copied by the writer, which keeps one chunk of each tensor at a time.
        return self._chunks[write_item.index.fqn, tuple(offsets or ())].memory


class LoadChunks(DefaultLoadPlanner):
    """Reads into this rank's chunks whatever parts of stored chunks they overlap with."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {(chunk.key, chunk.offsets): chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        by_key: dict[str, list[Chunk]] = {}
        for chunk in self._chunks.values():
            by_key.setdefault(chunk.key, []).append(chunk)
        items: list[ReadItem] = []
        for key, chunks in by_key.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(key, stored, [chunk.storage for chunk in chunks])
            if sum(prod(item.lengths) for item in found) != sum(chunk.memory.numel() for chunk in chunks):
                raise ValueError(f"the checkpoint does not hold all of {key}: load another one")
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offsets = read_item.dest_index.offset
        chunk = self._chunks[read_item.dest_index.fqn, tuple(offsets or ())]
        return self.transform_tensor(read_item, chunk.memory)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that DCP's metadata lists, by key.

    Raises:
        ValueError: It lists something that is not an fp32 tensor.
    """
    shapes = {}
    for key, stored in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata) or stored.properties.dtype != torch.float32:
            raise ValueError(f"{folder} holds {key!r}, which is not an fp32 tensor: load another checkpoint")
        shapes[key] = tuple(stored.size)
    return shapes


def read_chunks(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Reads on this process alone; no collective call."""
    _read(folder, LoadChunks(chunks), {})


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Whole fp32 tensors, on this process alone."""
    tensors = {key: torch.empty(shape) for key, shape in shapes.items()}
    _read(folder, DefaultLoadPlanner(flatten_state_dict=False), tensors)
    return tensors


def _read(folder: Path, planner: DefaultLoadPlanner, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # not an Exception: it would pass by whoever handles those
            raise next(iter(error.failures.values()))[0] from None
