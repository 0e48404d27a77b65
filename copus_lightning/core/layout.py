"""Layouts of ranks and the configurations that a run can be in.

| word            | meaning                                                                       |
|-----------------|-------------------------------------------------------------------------------|
| `Layout`        | data, tensor and pipeline sizes, written `dp4-tp1-pp2`                        |
| `Coordinates`   | the place of one rank in a layout                                             |
| `ModelShape`    | the sizes of a model that decide which layouts it fits                        |
| `Configuration` | a layout with a global batch and a micro-batch: what a policy chooses         |

Rank order: pipeline outermost, then data, tensor innermost, as in DeepSpeed's
`PipeModelDataParallelTopology`, so that tensor peers are neighbours on one node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AXES = ("data", "tensor", "pipeline")

_LAYOUT_PATTERN = re.compile(r"dp([1-9]\d*)-tp([1-9]\d*)-pp([1-9]\d*)")


def _require_positive_int(key: str, value: Any) -> None:
    # bool is an int in Python, and True as a size is always a mistake.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, order=True)
class Coordinates:
    """Indices of one rank along each axis of a layout, each from 0."""

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide which layouts it fits.

    Args:
        n_layers: Transformer layers; a pipeline stage owns at least one.
        n_heads: Query heads of one layer.
        n_kv_heads: Key/value heads of one layer.
        vocab_size: Rows of the embedding table.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward part.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for key in ("n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_size", "intermediate_size"):
            _require_positive_int(key, getattr(self, key))


@dataclass(frozen=True, order=True)
class Layout:
    """Data, tensor and pipeline parallel sizes, in ranks.

    Raises:
        ValueError: If a size is not a whole number of at least 1.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            _require_positive_int(f"layout.{axis}", getattr(self, axis))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `dp4-tp1-pp2`.

        Raises:
            ValueError: If `text` is written in any other way.
        """
        match = _LAYOUT_PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"layout {text!r} is not understood: write it like 'dp4-tp1-pp2'")
        data, tensor, pipeline = map(int, match.groups())
        return cls(data=data, tensor=tensor, pipeline=pipeline)

    def __str__(self) -> str:
        return f"dp{self.data}-tp{self.tensor}-pp{self.pipeline}"

    @property
    def world_size(self) -> int:
        """Ranks that the layout takes."""
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank` in the layout."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside {self}"
        replica, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(replica, self.data)
        return Coordinates(data=data, tensor=tensor, pipeline=pipeline)

    def rank_of(self, *, data: int, tensor: int, pipeline: int) -> int:
        """The rank at a place: `(pipeline * DATA + data) * TENSOR + tensor`."""
        assert 0 <= data < self.data and 0 <= tensor < self.tensor and 0 <= pipeline < self.pipeline, (
            f"(data={data}, tensor={tensor}, pipeline={pipeline}) is outside {self}"
        )
        return (pipeline * self.data + data) * self.tensor + tensor

    def axis_ranks(self, axis: str, rank: int) -> list[int]:
        """Ranks, ascending, that differ from `rank` only in `axis` ("data", "tensor" or "pipeline")."""
        assert axis in AXES, f"axis must be one of {AXES}, got {axis!r}"
        place = self.coordinates(rank)
        fixed = {"data": place.data, "tensor": place.tensor, "pipeline": place.pipeline}
        return [self.rank_of(**{**fixed, axis: index}) for index in range(getattr(self, axis))]

    def problems(self, world_size: int | None = None, shape: ModelShape | None = None) -> list[str]:
        """Why a world or a model does not fit this layout, one line each; empty if it fits."""
        lines = []
        if world_size is not None and self.world_size != world_size:
            lines.append(
                f"layout {self} takes {self.data} x {self.tensor} x {self.pipeline} = {self.world_size} ranks"
                f" but there are {world_size}: choose sizes whose product is {world_size}"
            )
        if shape is not None:
            for key in ("n_heads", "n_kv_heads"):
                heads = getattr(shape, key)
                if heads % self.tensor:
                    sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
                    lines.append(
                        f"layout {self}: {key}={heads} does not divide by the tensor size {self.tensor}:"
                        f" choose a tensor size among {sizes}"
                    )
            for key in ("vocab_size", "hidden_size", "intermediate_size"):
                # Uneven shards are fine, empty ones are not.
                if getattr(shape, key) < self.tensor:
                    lines.append(
                        f"layout {self}: {key}={getattr(shape, key)} is smaller than the tensor size"
                        f" {self.tensor}: choose a smaller tensor size"
                    )
            if self.pipeline > shape.n_layers:
                lines.append(
                    f"layout {self}: {self.pipeline} pipeline stages for n_layers={shape.n_layers}:"
                    f" choose a pipeline size of at most {shape.n_layers}"
                )
        return lines

    def check(self, world_size: int | None = None, shape: ModelShape | None = None) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: With the first of `problems`.
        """
        for line in self.problems(world_size, shape):
            raise ValueError(line)


def enumerate_layouts(world_size: int, shape: ModelShape | None = None) -> list[Layout]:
    """Every layout of `world_size` ranks, and with a `shape` only those that the model fits.

    Returns:
        Layouts ordered by tensor size, then pipeline size, each ascending: pure data parallelism comes first.
    """
    _require_positive_int("world_size", world_size)
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    layouts = [
        Layout(data=world_size // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
        for tensor in divisors
        for pipeline in divisors
        if world_size % (tensor * pipeline) == 0
    ]
    return [layout for layout in layouts if not layout.problems(shape=shape)]


@dataclass(frozen=True, order=True)
class Configuration:
    """A layout with a global batch and a micro-batch: everything that a policy chooses.

    Args:
        layout: Sizes of the parallel axes.
        global_batch_size: Samples of one optimizer step, over all data ranks.
        micro_batch_size: Samples of one forward and backward on one data rank.

    Raises:
        ValueError: If a size is not positive, or the global batch does not divide into whole micro-batches on
            every data rank; the message names the nearest global batches that do.
    """

    layout: Layout
    global_batch_size: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise ValueError(f"layout must be a Layout, got {self.layout!r}: use Layout.parse('dp4-tp1-pp2')")
        _require_positive_int("global_batch_size", self.global_batch_size)
        _require_positive_int("micro_batch_size", self.micro_batch_size)
        unit = self.layout.data * self.micro_batch_size
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            nearest = f"{below} or {below + unit}" if below else str(below + unit)
            raise ValueError(
                f"global_batch_size={self.global_batch_size} does not divide by {unit} ({self.layout.data}"
                f" data ranks of {self.layout} x micro_batch_size={self.micro_batch_size}): use {nearest}"
            )

    @property
    def data_rank_batch_size(self) -> int:
        """Samples of one optimizer step on one data rank: `B_g / d`."""
        return self.global_batch_size // self.layout.data

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step on one data rank: `n = B_g / (d * B_m)`."""
        return self.data_rank_batch_size // self.micro_batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, as written to every record: `from_dict` reads it back."""
        return {
            "layout": str(self.layout),
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Configuration:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: If a key is missing or unknown, or a value is not valid.
        """
        expected = {"layout", "global_batch_size", "micro_batch_size"}
        if not isinstance(fields, Mapping) or set(fields) != expected:
            raise ValueError(f"a configuration has the keys {', '.join(sorted(expected))}, got {fields!r}")
        return cls(
            layout=Layout.parse(fields["layout"]),
            global_batch_size=fields["global_batch_size"],
            micro_batch_size=fields["micro_batch_size"],
        )

    def __str__(self) -> str:
        return f"{self.layout} batch {self.global_batch_size} micro-batch {self.micro_batch_size}"
