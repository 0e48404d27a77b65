"""What a checkpoint is on disk: a folder with a manifest, that appears whole or not at all.

| file          | contents                                                                                 |
|---------------|------------------------------------------------------------------------------------------|
| `copus.json`  | the manifest: what was saved, and size and checksum of every other file                  |
| `.metadata`   | of PyTorch's distributed checkpoint: which box of which tensor is where                  |
| `*.distcp`    | boxes of fp32 masters (key: parameter name) and moments (`optimizer/KEY/parameter name`) |
| `state.pt`    | step counts, hyperparameters, random generators, and the caller's own state              |

A checkpoint `NAME` is written into the sibling folder `.NAME.saving`, the manifest last, and renamed. One that it
replaces is renamed to `.NAME.previous` before and removed after, and is read as `NAME` if it is all there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "copus-checkpoint/1"
MANIFEST, METADATA, STATE = "copus.json", ".metadata", "state.pt"
_CHUNK_BYTES = 4 * 2**20


def moment_key(state_key: str, name: str) -> str:
    """Under which a moment is stored; the master of a parameter is stored under its name alone."""
    return f"optimizer/{state_key}/{name}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        saved_at: Seconds since 1970, after those of the checkpoints beside it.
        versions: Of the packages that wrote it.
        model: `class`, Hugging Face `config`, `fingerprint`, and `tied`: second name of a parameter to its first.
        tensors: Shape of every parameter, by name.
        optimizer: `class`, `stepped` (else there are no moments), and `groups` with the `tensors` of each,
            names of `moments`, and for people to read `scalars` and `hyperparameters`. None if the weights were
            saved alone.
        training: `configuration`, `world_size`, `zero_stage` and `precision` in which it was saved; none of them
            binds whoever loads it.
        labels: What the caller wants to be known before anything is loaded.
        files: `bytes` and `crc32` of each file but this one.
    """

    saved_at: float
    versions: dict[str, str]
    model: dict[str, Any]
    tensors: dict[str, list[int]]
    optimizer: dict[str, Any] | None
    training: dict[str, Any]
    labels: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all stored tensors, masters and moments, by key."""
        shapes = {name: tuple(shape) for name, shape in self.tensors.items()}
        found = dict(shapes)
        if self.optimizer is not None and self.optimizer["stepped"]:
            for group in self.optimizer["groups"]:
                for name in group["tensors"]:
                    found.update({moment_key(key, name): shapes[name] for key in group["moments"]})
        return found

    def difference(self, fingerprint: dict[str, Any]) -> tuple[str, Any, Any] | None:
        """What tells the saved model from one of this fingerprint: its name, there and here; None if nothing does."""
        for name, there in self.model["fingerprint"].items():
            if fingerprint.get(name) != there:
                return name, there, fingerprint.get(name)
        return None

    def write(self, folder: Path) -> None:
        """Writes `copus.json`, which makes the folder complete."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        temporary = folder / f"{MANIFEST}.tmp"
        write_file(temporary, text.encode())
        temporary.rename(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads `copus.json`.

        Raises:
            ValueError: There is none, or it is not one of this format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{folder} is not a complete checkpoint of copus-lightning: it has no {MANIFEST}; give the folder "
                "that fabric.save or Trainer wrote"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} cannot be read ({reason}): load another checkpoint") from None


# -- files -------------------------------------------------------------------------------------------------


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Writes a file through to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum, as in the manifest."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": path.stat().st_size, "crc32": f"{checksum:08x}"}


def check_files(folder: Path, manifest: Manifest, share: int = 0, n_shares: int = 1) -> None:
    """Checks that the folder holds exactly the manifest's files, and the contents of one share of them.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        share: Index of the share whose checksums are computed; -1: none.
        n_shares: In how many shares several processes divide that work.

    Raises:
        ValueError: One line that names the file.
    """
    fix = "load another checkpoint"
    present = {p.name for p in folder.iterdir()} - {MANIFEST}
    for name in sorted(present - manifest.files.keys()):
        raise ValueError(f"{folder / name} is not part of this checkpoint: remove it, or {fix}")
    for number, (name, expected) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        if name not in present:
            raise ValueError(f"{path} is missing: {fix}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{path} has {size} bytes instead of {expected['bytes']}: {fix}")
        if number % n_shares == share and describe_file(path)["crc32"] != expected["crc32"]:
            raise ValueError(f"{path} is damaged, its checksum differs: {fix}")


# -- appearing whole or not at all -------------------------------------------------------------------------


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same path from any working directory; a link is followed, since what it names will be renamed."""
    found = Path(os.path.abspath(path))
    return found.resolve() if found.is_symlink() else found


def saving(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.parent / f".{path.name}.saving"


def previous(path: Path) -> Path:
    """Where the one that is replaced stands for a moment."""
    return path.parent / f".{path.name}.previous"


def begin(path: Path) -> None:
    """Makes the folder to write into. One process.

    Raises:
        ValueError: Something that is not a checkpoint is in the way.
    """
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{path} is a file: a checkpoint is a folder, choose another path")
        if any(path.iterdir()) and not (path / MANIFEST).is_file():
            raise ValueError(f"{path} holds files that are not a checkpoint: choose another path")
    shutil.rmtree(saving(path), ignore_errors=True)
    saving(path).mkdir(parents=True)


def complete(path: Path, between: Callable[[], None] = lambda: None) -> None:
    """Puts what was written in its place. One process.

    Args:
        path: Where the checkpoint is to be.
        between: Called while neither it nor the one before has the name. For tests.
    """
    _sync_folder(saving(path))
    if path.exists():
        shutil.rmtree(previous(path), ignore_errors=True)
        path.rename(previous(path))
        between()
    saving(path).rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(previous(path), ignore_errors=True)


def removing(path: Path) -> Path:
    """Where one that is no longer wanted stands while it is removed, so that no half of it has its name."""
    return path.parent / f".{path.name}.removing"


def remove(path: Path) -> None:
    """Removes a checkpoint, if it can be. One process."""
    with contextlib.suppress(OSError):
        shutil.rmtree(removing(path), ignore_errors=True)
        path.rename(removing(path))
        shutil.rmtree(removing(path), ignore_errors=True)


def remove_leftovers(folder: Path, but: Path) -> None:
    """Removes what saves and removals that were interrupted have left. One process.

    Args:
        folder: Of the checkpoints.
        but: The one that may be being written.
    """
    for path in [*folder.glob(".*.saving"), *folder.glob(".*.removing"), *folder.glob(".*.previous")]:
        name = path.name[1:].rpartition(".")[0]
        replaced = path.name.endswith(".previous")
        if name != but.name and (not replaced or (folder / name / MANIFEST).is_file()):
            shutil.rmtree(path, ignore_errors=True)


def abandon(path: Path) -> None:
    """Removes what a failed save has written. One process."""
    shutil.rmtree(saving(path), ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve(path: str | os.PathLike[str]) -> Path:
    """The folder to read for a checkpoint's path.

    Raises:
        ValueError: There is none.
    """
    found = absolute(path)
    if not found.exists() and (previous(found) / MANIFEST).is_file():
        return previous(found)
    if not found.exists():
        raise ValueError(
            f"checkpoint {found} does not exist: give the folder that fabric.save or Trainer wrote"
        )
    if not found.is_dir():
        raise ValueError(
            f"checkpoint {found} is a file, not a folder that fabric.save or Trainer wrote with this strategy: load "
            "weights from a file into the model before it is set up"
        )
    return found


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a folder that was saved last, for a resume; None if there is none.

    Warns of those that are passed over because files of theirs are missing or cut short.
    """
    for reason in damaged_ones(directory).values():
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    return next(iter(complete_ones(directory)), None)


def damaged_ones(directory: str | os.PathLike[str]) -> dict[Path, str]:
    """What is visibly wrong with checkpoints in a folder, by path; one line each."""
    reasons = {}
    for manifest in sorted(Path(directory).glob(f"[!.]*/{MANIFEST}")):
        try:
            read_complete(manifest.parent)
        except (ValueError, OSError) as error:
            reasons[manifest.parent] = str(error)
    return reasons


def complete_ones(directory: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in a folder, the one that was saved last first.

    What a save that was interrupted has left is passed over. Sizes are compared; checksums are when one is loaded.
    """
    found: dict[Path, float] = {}
    folder = Path(directory)
    for child in sorted(folder.iterdir()) if folder.is_dir() else []:
        path = child
        if child.name.startswith(".") and child.name.endswith(".previous"):
            path = folder / child.name[1 : -len(".previous")]
        elif child.name.startswith("."):
            continue
        try:
            manifest = read_complete(path)
        except (ValueError, OSError):
            continue
        found[path] = manifest.saved_at
    return sorted(found, key=lambda path: (found[path], path), reverse=True)


def last_saved_at(folder: Path) -> float | None:
    """When the newest checkpoint in a folder was saved, complete or not; None if there is none.

    Of many, only those are read that the file system says were written last.
    """
    times = []
    with contextlib.suppress(OSError):
        manifests = sorted(folder.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
        for manifest in manifests[-8:]:
            with contextlib.suppress(ValueError, TypeError, OSError):
                times.append(float(Manifest.read(manifest.parent).saved_at))
    return max(times, default=None)


def read_complete(path: Path) -> Manifest:
    """The manifest, if all files that it names are there in their sizes.

    Raises:
        ValueError: They are not.
    """
    manifest = Manifest.read(resolve(path))
    check_files(resolve(path), manifest, share=-1)
    return manifest
