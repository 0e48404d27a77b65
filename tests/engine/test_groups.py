"""Process groups of a layout: who is in them, that they are shared, and that they end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from world import World

from copus_lightning.core.layout import enumerate_layouts
from copus_lightning.engine.groups import AXES, GroupCache, axis_groups

from .tiny import LAYOUTS

ALL_LAYOUTS = [layout for world_size in (1, 2, 4, 8, 12) for layout in enumerate_layouts(world_size)]


@pytest.mark.parametrize("axis", AXES)
def test_each_rank_is_in_one_group_of_each_axis(axis: str) -> None:
    for layout in ALL_LAYOUTS:
        groups = axis_groups(layout, axis)
        assert sorted(rank for members in groups for rank in members) == list(range(layout.world_size))
        assert groups == sorted(groups), f"{layout}: the order is not the same on all ranks"
        assert all(members == tuple(sorted(members)) for members in groups), layout


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_members_differ_in_their_axis_alone(axis: str) -> None:
    for layout in ALL_LAYOUTS:
        for members in axis_groups(layout, axis):
            places = [layout.coordinates(rank) for rank in members]
            assert [getattr(place, axis) for place in places] == list(range(getattr(layout, axis))), layout
            for other in {"data", "tensor", "pipeline"} - {axis}:
                assert len({getattr(place, other) for place in places}) == 1, layout


def test_a_replica_is_one_whole_copy_of_the_model() -> None:
    for layout in ALL_LAYOUTS:
        for members in axis_groups(layout, "replica"):
            assert len(members) == layout.tensor * layout.pipeline, layout
            assert len({layout.coordinates(rank).data for rank in members}) == 1, layout


def test_ends_are_the_first_and_the_last_stage() -> None:
    for layout in ALL_LAYOUTS:
        last = layout.pipeline - 1
        for members in axis_groups(layout, "ends"):
            places = [layout.coordinates(rank) for rank in members]
            stages = [place.pipeline for place in places]
            if set(stages) & {0, last} and last > 0:
                assert stages == [0, last], layout
                assert (places[0].data, places[0].tensor) == (places[1].data, places[1].tensor), layout
            else:
                assert len(members) == 1, layout


def use_groups(keep: bool) -> list[str]:
    """Makes and uses the groups of all layouts; returns what is not as it should be."""
    wrong: list[str] = []
    rank = dist.get_rank()
    cache = GroupCache(keep=keep, timeout_seconds=77)
    counts = []
    for layout in [*LAYOUTS[4], *LAYOUTS[4]]:
        groups = cache.get(layout)
        assert groups.layout == layout
        for axis in AXES:
            members = next(m for m in axis_groups(layout, axis) if rank in m)
            group = getattr(groups, axis)
            if group._get_backend(torch.device("cpu")).options._timeout.total_seconds() != 77:
                wrong.append(f"{layout} {axis}: time-out")
            if tuple(dist.get_process_group_ranks(group)) != members:
                wrong.append(f"{layout} {axis}: members")
            total = torch.tensor(1 << rank)
            dist.all_reduce(total, group=group)
            if total.item() != sum(1 << member for member in members):
                wrong.append(f"{layout} {axis}: sum")
        count = len(cache)
        again = cache.get(layout)
        if len(cache) != count or any(getattr(again, a) is not getattr(groups, a) for a in AXES):
            wrong.append(f"{layout}: made twice")
        cache.release([layout])
        needed = {members for axis in AXES for members in axis_groups(layout, axis)}
        if not keep and len(cache) > len(needed) + dist.get_world_size():
            wrong.append(f"{layout}: groups of other layouts are alive")
        counts.append(len(cache))
    if counts[5] != counts[11]:
        wrong.append(f"the second round made groups: {counts}")
    cache.close()
    if len(cache) or len(dist.distributed_c10d._world.pg_map) != 1:
        wrong.append("groups are alive after close")
    return wrong


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "released"])
def test_groups_have_their_members_work_and_end(world: World, keep: bool) -> None:
    assert world.run(use_groups, keep) == [[], [], [], []]
