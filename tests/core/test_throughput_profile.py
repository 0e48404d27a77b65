from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.core.profile import Infeasible, Measurement, Profile

DP, PP = Layout(data=2), Layout(pipeline=2)


def example() -> Profile:
    measurements = [
        Measurement(layout, micro, n, step_seconds=alpha + n * micro * beta, peak_memory_bytes=100 * micro)
        for layout, alpha, beta in ((DP, 1.0, 0.1), (PP, 0.1, 0.15))
        for micro in (1, 2)
        for n in (1, 2, 4)
    ]
    return Profile(
        model={"hidden_size": 64, "precision": "bf16"},
        hardware={"device": "cpu", "threads": [1, 2]},
        world_size=2,
        measurements=measurements,
        infeasible=[Infeasible(DP, 8, "out of memory: 12 GiB asked, 10 GiB there")],
        switch_seconds=0.5,
    )


def test_prediction_follows_the_fit() -> None:
    profile = example()
    fit = profile.fit(DP, 2)
    assert fit.alpha_seconds == pytest.approx(1.0)
    assert fit.beta_seconds == pytest.approx(0.2)
    assert fit.left_out_error == pytest.approx(0, abs=1e-9)
    configuration = Configuration(DP, global_batch_size=32, micro_batch_size=2)
    assert profile.step_seconds(configuration) == pytest.approx(1.0 + 8 * 0.2)
    assert profile.throughput(configuration) == pytest.approx(32 / 2.6)


def test_a_point_added_later_changes_the_fit() -> None:
    profile = example()
    before = profile.fit(DP, 1)
    profile.add(Measurement(DP, 1, 8, step_seconds=3.0))
    assert profile.fit(DP, 1) != before
    with pytest.raises(ValueError, match="duplicate"):
        profile.add(Measurement(DP, 1, 8, step_seconds=3.1))
    with pytest.raises(ValueError, match="step_seconds"):
        profile.add(Measurement(DP, 1, 16, step_seconds=-1.0))
    assert len(profile.measurements) == 13


def test_candidates_are_what_was_measured_fits_and_divides() -> None:
    profile = example()
    found = profile.configurations([2, 4, 3])
    assert found == [
        Configuration(DP, 2, 1),
        Configuration(DP, 4, 1),
        Configuration(DP, 4, 2),
        Configuration(PP, 2, 1),
        Configuration(PP, 3, 1),
        Configuration(PP, 4, 1),
        Configuration(PP, 2, 2),
        Configuration(PP, 4, 2),
    ]
    assert all(profile.is_feasible(configuration) for configuration in found)
    assert not profile.is_feasible(Configuration(DP, 16, 8))
    profile.mark_infeasible(PP, 1, "failed\n  twice")
    profile.mark_infeasible(PP, 1, "out of\n memory")
    assert profile.infeasible[-1] == Infeasible(PP, 1, "out of memory")
    assert len(profile.infeasible) == 2
    assert {c.micro_batch_size for c in profile.configurations([2, 4]) if c.layout == PP} == {2}
    # What runs now can still be predicted, so that it can be compared with where to go.
    assert profile.throughput(Configuration(PP, 4, 1)) > 0


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dp2-tp1-pp1 .*micro_batch_size=3 .*copus profile") as error:
        example().fit(DP, 3)
    assert "\n" not in str(error.value)


def test_live_correction_scales_throughput_but_not_the_fit() -> None:
    profile = example()
    here, elsewhere = Configuration(DP, 8, 1), Configuration(PP, 8, 1)
    fitted, there = profile.step_seconds(here), profile.throughput(elsewhere)
    for _ in range(5):
        profile.observe(here, 1.25 * fitted)
    assert profile.correction(DP, 1) == pytest.approx(1.25)
    assert profile.step_seconds(here) == fitted
    assert profile.throughput(here) == pytest.approx(8 / fitted / 1.25)
    assert profile.throughput(elsewhere) == pytest.approx(there / 1.25)
    profile.observe(Configuration(DP, 6, 3), 1.0)  # not measured: no ratio to take
    profile.observe(here, float("nan"))
    profile.observe(here, 0.0)
    assert profile.correction(DP, 1) == pytest.approx(1.25)


def test_learned_state_round_trip() -> None:
    profile, resumed = example(), example()
    profile.observe(Configuration(DP, 8, 1), 5.0)
    profile.mark_infeasible(PP, 2, "out of memory")
    resumed.load_state_dict(json.loads(json.dumps(profile.state_dict())))
    assert resumed.state_dict() == profile.state_dict()
    assert resumed.correction(DP, 1) == profile.correction(DP, 1)

    remeasured = example()
    remeasured.measurements = remeasured.measurements[:-1]
    remeasured.load_state_dict(profile.state_dict())
    assert remeasured.correction(DP, 1) == 1.0, "ratios to another fit are not taken over"
    assert not remeasured.is_feasible(Configuration(PP, 2, 2))


def test_file_round_trip(tmp_path: Path) -> None:
    profile = example()
    profile.add(Measurement(PP, 4, 1, step_seconds=1.0, peak_memory_bytes=None))
    path = tmp_path / "new" / "profile.json"
    profile.save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]
    loaded = Profile.load(path)
    assert loaded == profile
    assert loaded.source == str(path)
    loaded.check(model=profile.model, hardware={"threads": (1, 2), "device": "cpu"}, world_size=2)


def test_switch_seconds_may_be_left_out(tmp_path: Path) -> None:
    document = example().to_dict()
    del document["switch_seconds"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    assert Profile.load(path).switch_seconds is None


def put(document: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    place: Any = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return document


FIRST = ("measurements", 0)


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (("format",), "copus-profile/0", "format"),
        (("surplus",), 1, "surplus"),
        (("model",), "llama", "model"),
        (("hardware",), None, "hardware"),
        (("world_size",), 0, "world_size"),
        (("world_size",), "2", "world_size"),
        (("switch_seconds",), -1, "switch_seconds"),
        (("measurements",), {}, "measurements"),
        (FIRST, 3, r"measurements\[0\]"),
        ((*FIRST, "surplus"), 1, "surplus"),
        ((*FIRST, "layout"), "dp2", r"measurements\[0\].layout"),
        ((*FIRST, "layout"), "dp4-tp1-pp1", r"measurements\[0\].layout"),
        ((*FIRST, "micro_batch_size"), 0, r"measurements\[0\].micro_batch_size"),
        ((*FIRST, "micro_batch_size"), True, r"measurements\[0\].micro_batch_size"),
        ((*FIRST, "accumulation"), 1.0, r"measurements\[0\].accumulation"),
        ((*FIRST, "accumulation"), 2, "duplicate"),
        ((*FIRST, "step_seconds"), -0.1, r"measurements\[0\].step_seconds"),
        ((*FIRST, "step_seconds"), 0, r"measurements\[0\].step_seconds"),
        ((*FIRST, "step_seconds"), "0.1", r"measurements\[0\].step_seconds"),
        ((*FIRST, "peak_memory_bytes"), -1, r"measurements\[0\].peak_memory_bytes"),
        ((*FIRST, "peak_memory_bytes"), 1.5, r"measurements\[0\].peak_memory_bytes"),
        (("infeasible",), None, "infeasible"),
        (("infeasible", 0, "reason"), 3, r"infeasible\[0\].reason"),
        (("infeasible", 0, "layout"), 3, r"infeasible\[0\].layout"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, keys: Any, value: Any, named: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(put(example().to_dict(), keys, value)))
    with pytest.raises(ValueError, match=named) as error:
        Profile.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["format", "model", "hardware", "world_size", "measurements", "infeasible"])
def test_a_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    document = example().to_dict()
    del document[key]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"broken.json: .*'{key}'"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not a JSON profile"),
        ('{"format": "copus-profile/1",', "not a JSON profile"),
        ("[]", "must be an object"),
        ('{"format": "copus-profile/1", "format": "copus-profile/1"}', "'format' stands twice"),
        ('{"world_size": NaN}', "NaN"),
    ],
)
def test_what_is_not_a_profile_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=named) as error:
        Profile.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_duplicate_infeasible_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    document = example().to_dict()
    document["infeasible"] *= 2
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"infeasible\[1\] is a duplicate"):
        Profile.load(path)
    with pytest.raises(ValueError, match=r"absent.json: .*copus profile"):
        Profile.load(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Profile.load(tmp_path)


def test_a_profile_of_something_else_is_refused_with_what_differs() -> None:
    profile = example()
    profile.check()
    profile.check(model=profile.model, hardware=profile.hardware, world_size=2)
    for wanted, said in (
        ({"model": {"hidden_size": 128, "precision": "bf16"}}, "model (hidden_size was 64, is 128)"),
        ({"model": {"hidden_size": 64}}, 'model (precision was "bf16", is absent)'),
        ({"hardware": {"device": "cuda", "threads": [1, 2]}}, 'hardware (device was "cpu", is "cuda")'),
        ({"world_size": 4}, "2 ranks, this run has 4"),
    ):
        with pytest.raises(ValueError) as error:
            profile.check(**wanted)
        assert said in str(error.value) and "copus profile" in str(error.value)
        assert "\n" not in str(error.value)


def test_table_lines_up_and_says_what_cannot_run() -> None:
    lines = example().table().splitlines()
    assert lines[0].split() == [
        "layout", "micro", "alpha", "s", "beta", "s", "error", "limit/s", "peak", "MiB", "n=1", "n=2", "n=4"
    ]  # fmt: skip
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[2].split()[:6] == ["dp2-tp1-pp1", "2", "1.0000", "0.2000", "0.0%", "20.0"]
    assert lines[-1] == ("dp2-tp1-pp1  micro-batch 8 cannot run: out of memory: 12 GiB asked, 10 GiB there")
    assert Profile(model={}, hardware={}, world_size=2).table().startswith("layout")


def test_the_documented_example_is_a_profile(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    block = page.split("```json\n", 1)[1].split("```", 1)[0]
    path = tmp_path / "profile.json"
    path.write_text(block)
    profile = Profile.load(path)
    assert profile.measurements and profile.infeasible
    assert profile.to_dict() == json.loads(block)
