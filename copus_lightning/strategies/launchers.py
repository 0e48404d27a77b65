"""How the other ranks of a machine are started, and what becomes of a run that has lost one.

Lightning runs the script once more for each rank, and kills the first rank soon after another is gone: before it
could say which one was lost. Here the first rank is left the time to find out, and to end with that error.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

NOTICE_SECONDS = 20.0
"""How long the ranks that are left have to agree on who is lost."""


class RankWatch:
    """Looks after the ranks that this process has started.

    Once one of them has failed, this process has :data:`NOTICE_SECONDS` to come to know of it and end by itself. It
    may never do so, as in a collective of GPUs; then it is ended, with a line that names the rank. If it ends with an
    error, so do the others.

    Args:
        children: The ranks, in order.
        first: Rank of this process.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]], first: int) -> None:
        self.children, self.first = list(children), first
        self._done = threading.Event()
        threading.Thread(target=self._run, name="copus-rank-watch", daemon=True).start()
        atexit.register(self._at_exit)

    def failed(self) -> list[int]:
        """Ranks that ended with an error."""
        return [self.first + n for n, child in enumerate(self.children, start=1) if child.poll()]

    def stop(self) -> None:
        """Leaves this process alone from now on."""
        self._done.set()

    def end_ranks(self) -> None:
        """Ends those that still run."""
        for child in self.children:
            if child.poll() is None:
                child.kill()

    def _run(self) -> None:
        while not self._done.wait(1.0):
            lost = self.failed()
            if lost and not self._done.wait(NOTICE_SECONDS):
                print(
                    f"copus: rank {lost[0]} ended with an error: start the run again from its last checkpoint "
                    "(copus fit: run.resume=auto)",
                    file=sys.stderr,
                    flush=True,
                )
                self.end_ranks()
                os._exit(1)

    def _at_exit(self) -> None:
        self.stop()
        # The interpreter notes an error that nobody has caught before it comes here.
        if self.failed() or getattr(sys, "last_value", None) is not None:
            self.end_ranks()


class Watching:
    """Mixed into either of Lightning's launchers of a script: a watch of our own in place of Lightning's.

    Attributes:
        watch: None where another launcher has made the processes.
    """

    cluster_environment: Any
    num_processes: int
    procs: list[subprocess.Popen[bytes]]
    watch: RankWatch | None = None

    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()  # type: ignore[misc]
        first = self.cluster_environment.node_rank() * self.num_processes
        self.watch = RankWatch(self.procs, first)
        self.procs = []  # Lightning's observer ends when it has none to observe


class WatchingLauncher(Watching, _SubprocessScriptLauncher):
    """Fabric's launcher."""
