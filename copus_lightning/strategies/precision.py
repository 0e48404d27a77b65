"""The one place that reads which precision the user wishes."""

from __future__ import annotations

from typing import Any

import torch

SUPPORTED = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


def wanted_dtype(precision: Any) -> torch.dtype:
    """The type of weights and activations for a precision plugin of Fabric or Trainer.

    ``bf16-mixed`` and ``bf16-true`` are the same here: bf16 weights with fp32 masters, moments and accumulation.

    Raises:
        ValueError: Another precision than fp32 and bf16.
    """
    name = str(getattr(precision, "precision", "32-true"))
    if name not in SUPPORTED:
        raise ValueError(f"precision={name!r} is not supported by CopusStrategy: use {', '.join(SUPPORTED)}")
    return SUPPORTED[name]
