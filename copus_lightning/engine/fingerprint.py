"""What a throughput profile is of: a model and a machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from copus_lightning.engine.engine import Engine


def model_fingerprint(engine: Engine, sequence_length: int | None) -> dict[str, Any]:
    """What must agree for step times to carry over: the model's sizes, number type, ZeRO stage, tokens."""
    return {
        **engine.assembler.description.fingerprint(),
        "precision": str(engine.settings.dtype).removeprefix("torch."),
        "zero_stage": engine.settings.zero_stage,
        "sequence_length": sequence_length,
    }


def hardware_fingerprint(device: torch.device) -> dict[str, Any]:
    """The machine as one rank sees it: device, threads, backend and ranks per node."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()
    return {
        "device": name,
        "device_type": device.type,
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "backend": dist.get_backend() if dist.is_initialized() else "none",
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
