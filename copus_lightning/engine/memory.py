"""Host memory of this process, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import psutil

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident memory now."""
    return psutil.Process().memory_info().rss


def trim() -> None:
    """Gives free memory back to the system, where the C library can (glibc).

    Pieces of ever new sizes, made in helper threads, leave holes in its arenas that add up over many switches.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Measures by how much resident memory grew at most within a block.

    On Linux the kernel's high-water mark is reset and read; elsewhere the memory at the end stands in for it.

    Attributes:
        growth_bytes: Set when the block ends.
    """

    def __enter__(self) -> PeakMemory:
        self.growth_bytes = 0
        self._resets = False
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
            self._resets = True
        self._before = resident_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        peak = resident_bytes()
        if self._resets:
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
        self.growth_bytes = max(peak - self._before, 0)
