"""This process's random generators as plain values."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

States = dict[str, Any]


def capture(device: torch.device) -> States:
    """States of Python's, NumPy's, torch's and the device's generator, in types that any `torch.load` accepts."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = legacy
    states: States = {
        "python": random.getstate(),
        "numpy": [
            str(name),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(saved: Sequence[States], rank: int, device: torch.device) -> None:
    """Continues the stream of the rank with the same number.

    Where there was none, as the world is larger now, a new stream begins, so that no two ranks draw the same.
    """
    if rank >= len(saved):
        like = saved[rank % len(saved)]["torch"]
        seed = zlib.crc32(bytes(like.tolist()) + rank.to_bytes(8, "little"))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return
    states = saved[rank]
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
