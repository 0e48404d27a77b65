from __future__ import annotations

import itertools
import random

import pytest

from copus_lightning.core.layout import Configuration, Coordinates, Layout, ModelShape, enumerate_layouts

SHAPE = ModelShape(n_layers=6, n_heads=8, n_kv_heads=4, vocab_size=257, hidden_size=64, intermediate_size=176)


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_layout_is_read_as_it_is_written() -> None:
    layout = Layout.parse("dp4-tp1-pp2")
    assert layout == Layout(data=4, tensor=1, pipeline=2)
    assert str(layout) == "dp4-tp1-pp2"
    assert layout.world_size == 8


@pytest.mark.parametrize(
    "text", ["", "dp4", "dp4-tp1", "tp1-dp4-pp2", "dp0-tp1-pp1", "dp4-tp1-pp2x", "4x1x2", None]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="dp4-tp1-pp2") as error:
        Layout.parse(text)
    one_line(error)


@pytest.mark.parametrize(
    "sizes", [{"data": 0}, {"tensor": -1}, {"pipeline": 1.5}, {"data": True}, {"data": "2"}]
)
def test_sizes_are_positive_whole_numbers(sizes: dict) -> None:
    with pytest.raises(ValueError, match=f"layout.{next(iter(sizes))}"):
        Layout(**sizes)


def test_rank_order_is_pipeline_then_data_then_tensor() -> None:
    layout = Layout(data=3, tensor=2, pipeline=4)
    places = itertools.product(range(4), range(3), range(2))
    for rank, (pipeline, data, tensor) in enumerate(places):
        assert layout.coordinates(rank) == Coordinates(data=data, tensor=tensor, pipeline=pipeline)
        assert layout.rank_of(data=data, tensor=tensor, pipeline=pipeline) == rank


def test_axis_ranks_partition_the_world() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)
    assert layout.axis_ranks("tensor", 5) == [4, 5]
    assert layout.axis_ranks("data", 5) == [5, 7]
    assert layout.axis_ranks("pipeline", 5) == [1, 5]
    for axis in ("data", "tensor", "pipeline"):
        groups = {tuple(layout.axis_ranks(axis, rank)) for rank in range(8)}
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(8))


def test_enumeration_is_complete_and_ordered() -> None:
    assert [str(layout) for layout in enumerate_layouts(4)] == [
        "dp4-tp1-pp1",
        "dp2-tp1-pp2",
        "dp1-tp1-pp4",
        "dp2-tp2-pp1",
        "dp1-tp2-pp2",
        "dp1-tp4-pp1",
    ]
    for world_size in (1, 6, 8, 12, 64):
        layouts = enumerate_layouts(world_size)
        assert len(set(layouts)) == len(layouts)
        assert all(layout.world_size == world_size for layout in layouts)
        brute = sum(
            d * t * p == world_size for d, t, p in itertools.product(range(1, world_size + 1), repeat=3)
        )
        assert len(layouts) == brute


def test_enumeration_leaves_out_what_the_model_does_not_fit() -> None:
    layouts = enumerate_layouts(8, SHAPE)
    assert Layout(tensor=8) not in layouts and Layout(pipeline=8) not in layouts
    assert Layout(tensor=4, pipeline=2) in layouts
    assert all(not layout.problems(8, SHAPE) for layout in layouts)


def test_problems_name_the_number_and_the_fix() -> None:
    assert Layout(data=2).problems(world_size=2, shape=SHAPE) == []
    (line,) = Layout(data=2).problems(world_size=4)
    assert "2 ranks" in line and "product is 4" in line
    (line,) = Layout(tensor=8).problems(shape=SHAPE)
    assert "n_kv_heads=4" in line and "1, 2, 4" in line
    (line,) = Layout(pipeline=7).problems(shape=SHAPE)
    assert "n_layers=6" in line and "at most 6" in line
    small = ModelShape(
        n_layers=1, n_heads=8, n_kv_heads=8, vocab_size=5, hidden_size=64, intermediate_size=64
    )
    (line,) = Layout(tensor=8).problems(shape=small)
    assert "vocab_size=5" in line
    with pytest.raises(ValueError, match="n_layers=6") as error:
        Layout(pipeline=8).check(8, SHAPE)
    one_line(error)


def test_a_configuration_knows_its_accumulation() -> None:
    configuration = Configuration(Layout(data=2, pipeline=2), global_batch_size=24, micro_batch_size=3)
    assert configuration.data_rank_batch_size == 12
    assert configuration.accumulation == 4
    assert str(configuration) == "dp2-tp1-pp2 batch 24 micro-batch 3"


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=10 .* use 8 or 16") as error:
        Configuration(Layout(data=2), global_batch_size=10, micro_batch_size=4)
    one_line(error)
    with pytest.raises(ValueError, match=r"use 8$"):
        Configuration(Layout(data=2), global_batch_size=3, micro_batch_size=4)


def test_the_nearest_batches_are_the_nearest() -> None:
    draw = random.Random(0)
    for _ in range(200):
        layout, micro, batch = Layout(data=draw.randint(1, 9)), draw.randint(1, 9), draw.randint(1, 500)
        unit = layout.data * micro
        if batch % unit == 0:
            configuration = Configuration(layout, batch, micro)
            assert configuration.accumulation * unit == batch
            continue
        with pytest.raises(ValueError) as error:
            Configuration(layout, batch, micro)
        named = [int(word) for word in one_line(error).rsplit("use ", 1)[1].split(" or ")]
        expected = [size for size in range(batch - unit + 1, batch + unit) if size > 0 and size % unit == 0]
        assert named == expected


@pytest.mark.parametrize("key", ["global_batch_size", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -4, 2.0, True, "4", None])
def test_batch_sizes_are_positive_whole_numbers(key: str, value: object) -> None:
    fields = {"global_batch_size": 4, "micro_batch_size": 1, key: value}
    with pytest.raises(ValueError, match=key) as error:
        Configuration(Layout(), **fields)  # type: ignore[arg-type]
    one_line(error)


def test_a_configuration_survives_json() -> None:
    configuration = Configuration(Layout(pipeline=2), global_batch_size=4, micro_batch_size=1)
    fields = configuration.to_dict()
    assert fields == {"layout": "dp1-tp1-pp2", "global_batch_size": 4, "micro_batch_size": 1}
    assert Configuration.from_dict(fields) == configuration
    for broken in ({**fields, "extra": 1}, {"layout": "dp1-tp1-pp2"}, {**fields, "layout": "dp1"}, "dp1"):
        with pytest.raises(ValueError) as error:
            Configuration.from_dict(broken)  # type: ignore[arg-type]
        one_line(error)
