"""Process groups of a layout: the only place that makes or ends one.

Making a group is a collective call on every rank of the world, so groups are made in one fixed order: axis by
axis, and within an axis in order of their first rank. Groups with the same members are shared between axes and
between layouts. A group of all ranks is a group of its own, never the WORLD group: WORLD lives as long as the
process, while a layout's groups can be torn down at any moment to free ranks that wait for one that failed.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from copus_lightning.core.layout import Layout

AXES = ("data", "tensor", "pipeline", "replica", "ends", "world", "own")


def axis_groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """Members of every group of ``axis``, in order of their first rank; each rank is in exactly one.

    ``data``, ``tensor`` and ``pipeline`` hold the ranks that differ in that coordinate alone; ``replica`` the
    ranks of one data index (a whole copy of the model); ``ends`` the first and the last stage's ranks of one
    data and tensor index, for a weight tied over both (other stages are alone); ``world`` all ranks;
    ``own`` this rank alone.
    """
    ranks = range(layout.world_size)
    if axis in ("data", "tensor", "pipeline"):
        groups = {tuple(layout.axis_ranks(axis, rank)) for rank in ranks}
    elif axis == "replica":
        groups = {tuple(r for r in ranks if layout.coordinates(r).data == d) for d in range(layout.data)}
    elif axis == "world":
        groups = {tuple(ranks)}
    elif axis == "own":
        groups = {(rank,) for rank in ranks}
    else:
        groups = set()
        for rank in ranks:
            line = layout.axis_ranks("pipeline", rank)
            groups.add((line[0], line[-1]) if rank in (line[0], line[-1]) and len(line) > 1 else (rank,))
    return sorted(groups)


def _abort(group: ProcessGroup) -> None:
    with contextlib.suppress(Exception):
        group.abort()


@dataclass(frozen=True)
class LayoutGroups:
    """This rank's process groups under one layout; the attributes are the axes of :func:`axis_groups`."""

    layout: Layout
    data: ProcessGroup
    tensor: ProcessGroup
    pipeline: ProcessGroup
    replica: ProcessGroup
    ends: ProcessGroup
    world: ProcessGroup
    own: ProcessGroup


class GroupCache:
    """Makes, shares and ends process groups.

    Args:
        keep: Keep the groups of layouts that are no longer used, so that a return to one costs nothing. If
            false, :meth:`release` ends every group that the remaining layouts do not need.
        timeout_seconds: Longest wait for another rank in one of them; None: the backend's own.
    """

    def __init__(self, keep: bool = True, timeout_seconds: float | None = None) -> None:
        self.keep = keep
        self._timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def get(self, layout: Layout) -> LayoutGroups:
        """The groups of ``layout``. Every rank of the world must call this in the same order."""
        rank = dist.get_rank()
        mine: dict[str, ProcessGroup] = {}
        for axis in AXES:
            for members in axis_groups(layout, axis):
                group = self._group(members)
                if rank in members:
                    mine[axis] = group
        return LayoutGroups(layout=layout, **mine)

    def _group(self, members: tuple[int, ...]) -> ProcessGroup:
        if members not in self._groups:
            self._groups[members] = dist.new_group(list(members), timeout=self._timeout)
        return self._groups[members]

    def release(self, alive: list[Layout]) -> None:
        """Ends the groups that no layout of ``alive`` needs, unless groups are kept. Collective."""
        if not self.keep:
            self.end_all_but(alive)

    def end_all_but(self, alive: list[Layout]) -> None:
        """Ends the groups that no layout of ``alive`` needs. Collective."""
        needed = {members for layout in alive for axis in AXES for members in axis_groups(layout, axis)}
        for members in [m for m in self._groups if m not in needed]:
            group = self._groups.pop(members)
            if dist.get_rank() in members:
                dist.destroy_process_group(group)

    def abort(self) -> None:
        """Ends what waits in these groups with an error, where the backend can (NCCL). May be called from a thread."""
        # Together: the abort of one communicator of NCCL may wait for a kernel that hangs in another.
        mine = [group for group in list(self._groups.values()) if isinstance(group, ProcessGroup)]
        threads = []
        for group in mine:
            thread = threading.Thread(target=_abort, args=(group,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # memory may be what is short
                _abort(group)
            else:
                threads.append(thread)
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Ends every group that was made here.

        A group's connections close once nothing refers to it any more; a rank that waits for another in it then
        gets an error instead of waiting on.
        """
        for members in list(self._groups):
            group = self._groups.pop(members)
            if dist.get_rank() in members:
                dist.destroy_process_group(group)

    def __len__(self) -> int:
        """Number of groups made here and still alive."""
        return len(self._groups)
