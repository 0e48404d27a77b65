"""Host memory of this process, as the kernel counts it, and what a switch needs of a device's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

_LIBC = ctypes.CDLL(None) if os.name == "posix" else None
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Sizes(NamedTuple):
    """What one rank has on its device under one layout.

    Args:
        weights: Bytes of weights and of accumulated gradients.
        state: Bytes of one state key (the masters, or one of the moments).
        n_keys: State keys.
    """

    weights: int
    state: int
    n_keys: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.weights + self.state * self.n_keys


def switch_peak_bytes(before: Sizes, after: Sizes, one_by_one: bool) -> int:
    """Most that a rank has at a time in a switch, in bytes, once the old weights are gone.

    Args:
        before: Under the old layout.
        after: Under the new one; as many keys.
        one_by_one: A key is freed on the old side before the next one gets its memory on the new side.
    """
    n_keys = after.n_keys
    if not one_by_one:
        return after.nbytes + n_keys * before.state
    # From key to key the sum changes by the same amount, so that it is largest at the first or at the last one.
    return after.weights + max(n_keys * before.state + after.state, before.state + n_keys * after.state)


def way_back_bytes(before: Sizes, masters_are_weights: bool) -> int:
    """Most that a rank has at a time when a switch fails and the old layout is built again beside its held pieces.

    Args:
        before: Under the old layout.
        masters_are_weights: In fp32 held masters keep the old weights as a whole; weights and gradients are as large.
    """
    return before.nbytes + before.state + (before.weights // 2 if masters_are_weights else 0)


def resident_bytes() -> int:
    """Resident memory now."""
    return psutil.Process().memory_info().rss


def trim() -> None:
    """Gives free memory back to the system, where the C library can (glibc), and pinned memory too.

    Pieces of ever new sizes, made in helper threads, leave holes in its arenas that add up over many switches.
    """
    if _LIBC is not None and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    if torch.cuda.is_initialized() and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


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
