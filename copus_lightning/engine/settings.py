"""What the engine is told once, and keeps over all layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EngineSettings:
    """What stays the same over all layouts of a run.

    Args:
        zero_stage: 0, every data rank keeps all masters and moments of its shards; 1, each keeps a share.
        dtype: Of weights and activations: ``torch.float32``, or ``torch.bfloat16`` with fp32 masters, moments
            and gradient accumulation.
        gradient_clip_norm: Largest global gradient norm, or None.
        cache_groups: Keep the process groups of layouts that were left, for a cheap return.
        ranks_per_node: Ranks that share a node, preferred as sources in a switch; None if all are equally near.
        buffer_bytes: Size of the buffer through which pieces travel in a switch.
        timeout_seconds: Longest wait for another rank before the run ends with an error.
        one_by_one: In a switch, carry one state key (masters, then each moment) after the other and free each in
            the old layout before the next gets its memory in the new one, instead of all together. None: on
            every device but the CPU, where the new layout's memory is made ready while training goes on.
    """

    zero_stage: int = 1
    dtype: torch.dtype = torch.float32
    gradient_clip_norm: float | None = None
    cache_groups: bool = True
    ranks_per_node: int | None = None
    buffer_bytes: int = 64 * 2**20
    timeout_seconds: float = 1800.0
    one_by_one: bool | None = None

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1):
            raise ValueError(
                f"zero_stage must be 0 or 1, not {self.zero_stage!r}: pipelines do not go with higher ones"
            )
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"precision must be 32-true, bf16-true or bf16-mixed, not {self.dtype}")
        if self.gradient_clip_norm is not None and not self.gradient_clip_norm > 0:
            raise ValueError(f"gradient_clip_norm must be positive or null, not {self.gradient_clip_norm}")
