"""Programs as people run them, but for the seconds in which an interpreter imports torch, DeepSpeed and Transformers.

They run in forks of a process that has imported these. The ranks that Lightning then starts are interpreters
of their own.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from world import begin_fork, forks


class Command:
    """`python -m NAME ARGUMENTS` or `python FILE ARGUMENTS`, running. Killed at the end of a `with` block.

    Args:
        program: Name of a module, or path of a file.
        arguments: Of the program.
        cwd: Where it runs.
        environment: Variables that differ from those of this process; None: not set.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        self.arguments, self.cwd = [str(program), *arguments], cwd
        self._directory = tempfile.TemporaryDirectory(prefix="command")
        self._files = [Path(self._directory.name, name) for name in ("output", "errors")]
        changed = {**os.environ, **(environment or {})}
        variables = {name: value for name, value in changed.items() if value is not None}
        place = (self.arguments, cwd, variables, self._files)
        self._process: Any = forks().Process(target=_become, args=place, name=self.arguments[0])
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._process.exitcode

    def done(self, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """What it printed, and its exit status, once it has ended; it is killed after `timeout` seconds."""
        self._process.join(timeout)
        if self.poll() is None:
            self._process.kill()
            self._process.join()
        output, errors = (file.read_text() if file.exists() else "" for file in self._files)
        return subprocess.CompletedProcess(self.arguments, self._process.exitcode, output, errors)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self._process.kill()
        self._process.join()
        self._directory.cleanup()


def run(
    program: str | Path, *arguments: str, cwd: Path, environment: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; the arguments are those of `Command`."""
    with Command(program, *arguments, cwd=cwd, environment=environment) as command:
        return command.done()


def _become(arguments: list[str], cwd: Path, variables: dict[str, str], files: list[Path]) -> None:
    begin_fork()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, file in enumerate(files, start=1):
        with file.open("ab") as opened:
            os.dup2(opened.fileno(), descriptor)
    sys.argv = arguments
    program = arguments[0]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path.insert(0, str(cwd))
        runpy.run_module(program, run_name="__main__", alter_sys=True)
