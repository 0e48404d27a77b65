"""Frees a rank that waits in a collective for one that has failed.

Over gloo a failed rank closes its connections, and whoever waits for it gets an error at once. NCCL does not notice:
a kernel would wait on the device until the time-out of the group. So a failed rank announces over the rendezvous
store that it will come to the next agreement with a failure, and a thread on every rank that hears of it aborts
the communicators of the layout; the wait ends, and this rank comes to the agreement, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from copus_lightning.engine.agreement import Agreement

POLL_SECONDS = 1.0


class Watch:
    """A thread that listens until it is closed.

    Args:
        agreement: Over which failures are announced.
        abort: Called from the thread when another rank has failed and this one has not noticed yet.
        poll_seconds: Longest time until that is heard of.
    """

    def __init__(
        self, agreement: Agreement, abort: Callable[[], None], poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._agreement, self._abort, self._poll_seconds = agreement, abort, poll_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copus-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            try:
                self._agreement.if_announced(self._abort)
            except Exception:
                return  # the store is gone, and with it the run

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
