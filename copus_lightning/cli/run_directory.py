"""The directory of a run: claimed by one run at a time, and cleared of an earlier one's records."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from copus_lightning.config import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked
    fcntl = None  # type: ignore[assignment]

RECORDS = ("config.yaml", "metrics.csv", "events.jsonl", "summary.json", "*.png", "checkpoints")
LOCK = ".lock"

_claims: list[int] = []
"""Descriptors that stay open, and with them the locks, until the process ends."""


def claim(run_dir: Path) -> None:
    """Makes the directory, and keeps other runs out of it until this process ends, however it does.

    The lock is this process's alone: data workers that it forks do not hold it on after a kill. It goes if the process
    opens and closes the file anywhere else, and a file system without locks keeps nobody out.

    Raises:
        ConfigError: It cannot be made, or another run is in it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"run.run_dir: {run_dir} cannot be made ({error.strerror})") from None
    if fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 200).decode(errors="replace") or "unknown"
            os.close(file)
            raise ConfigError(
                f"run.run_dir: another run (process {holder}) is in {run_dir}: let it end, or set another run.run_dir"
            ) from None
        except OSError:
            pass
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()} on {socket.gethostname()}".encode())
    _claims.append(file)


def set_aside(run_dir: Path) -> None:
    """Moves the records of an earlier run in the same folder into `earlier-1`, `earlier-2`, ..."""
    found = [path for pattern in RECORDS for path in run_dir.glob(pattern)]
    if not found:
        return
    number = 1
    while (run_dir / f"earlier-{number}").exists():
        number += 1
    target = run_dir / f"earlier-{number}"
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
