"""Which checkpoints of a run are kept, and what is cleared away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_lightning.cli.checkpoints import Keeper
from copus_lightning.engine.checkpoint_format import MANIFEST, Manifest, remove


def save(folder: Path, saved_at: float) -> Path:
    folder.mkdir(parents=True)
    Manifest(
        saved_at=saved_at, versions={}, model={}, tensors={}, optimizer=None, training={}, labels={}
    ).write(folder)
    return folder


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    config: Any = SimpleNamespace(run=SimpleNamespace(checkpoint_every_tokens=None, run_dir=tmp_path))
    return Keeper(config, is_first_rank=True)


def names(keeper: Keeper) -> list[str]:
    return sorted(path.name for path in keeper.directory.iterdir())


def test_the_last_two_are_kept_and_nothing_that_is_no_checkpoint_is_touched(keeper: Keeper) -> None:
    for step in range(1, 5):
        save(keeper.path(step), saved_at=step)
    (keeper.directory / "step-notes").mkdir()
    keeper.remove_old(keeper.path(4))
    assert names(keeper) == ["step-00000003", "step-00000004", "step-notes"]
    keeper.remove_old(keeper.path(5))  # which is still being written
    assert names(keeper) == ["step-00000003", "step-00000004", "step-notes"]


def test_the_one_that_was_saved_last_stays_whatever_the_clocks_say(keeper: Keeper) -> None:
    for step in (1, 2):
        save(keeper.path(step), saved_at=1e10 + step)
    save(keeper.path(3), saved_at=5.0)
    keeper.remove_old(keeper.path(3))
    assert names(keeper) == ["step-00000002", "step-00000003"]


def test_what_could_not_be_read_does_not_count(keeper: Keeper) -> None:
    for step in range(1, 5):
        save(keeper.path(step), saved_at=step)
    keeper.damaged.add(keeper.path(3))
    keeper.remove_old(keeper.path(4))
    assert names(keeper) == ["step-00000002", "step-00000003", "step-00000004"]
    keeper.remove_old(keeper.path(3))  # a run that was taken back has come to its step again
    assert names(keeper) == ["step-00000003", "step-00000004"]


def test_leftovers_are_cleared_away(keeper: Keeper) -> None:
    save(keeper.path(7), saved_at=7)
    for name in (".step-00000003.removing", ".step-00000004.saving", ".step-00000007.previous"):
        (keeper.directory / name).mkdir()
    only_copy = save(keeper.directory / ".step-00000006.previous", saved_at=6)  # killed between two renames
    written = keeper.directory / ".step-00000008.saving"
    written.mkdir()
    keeper.remove_old(keeper.path(8))
    assert names(keeper) == [only_copy.name, written.name, "step-00000007"]


def test_what_is_removed_has_its_name_no_more_before_its_first_file_goes(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(keeper.path(1), saved_at=1)
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # killed in it
    remove(path)
    assert not path.exists() and (keeper.directory / ".step-00000001.removing" / MANIFEST).exists()
    remove(path)  # of what is gone
