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
from typing_extensions import override

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


class WatchingLauncher(_SubprocessScriptLauncher):
    """Fabric's launcher, with a watch of its own.

    Attributes:
        watch: None where another launcher has made the processes.
    """

    watch: RankWatch | None = None

    @override
    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        self.watch = RankWatch(self.procs, first_rank(self))
        self.procs = []  # Lightning's observer ends when it has none to observe


def first_rank(launcher: Any) -> int:
    """Rank of the process that starts the others of its machine."""
    return launcher.cluster_environment.node_rank() * launcher.num_processes
