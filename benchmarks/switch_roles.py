"""The processes that `switch.py` launches: one role each. Not to be run by hand."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TOKENS, BATCH, MICRO = 64, 8, 2
MESSAGE = 4 * 2**20
"""Elements of a message."""


def write(job: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Leaves rank 0's result for `switch.py`."""
    if dist.get_rank() == 0:
        Path(job["folder"], f"{name}.json").write_text(json.dumps(result))


def slowest(values: list[float]) -> list[float]:
    """Elementwise maximum over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


# -- this package ---------------------------------------------------------------------------------------------


def make_engine(job: dict[str, Any], layout: str, cache_groups: bool = True) -> Any:
    """An engine in bf16 with ZeRO-1 and AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from copus_lightning.core.layout import Configuration, Layout
    from copus_lightning.engine.engine import Engine, EngineSettings

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**job["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = EngineSettings(zero_stage=job["zero_stage"], dtype=torch.bfloat16, cache_groups=cache_groups)
    return Engine(
        model, optimizer, Configuration(Layout.parse(layout), BATCH, MICRO), settings, torch.device("cpu")
    )


def step(engine: Any) -> None:
    """One optimizer step on made-up tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.assembler.description.shape.vocab_size
    ids = torch.randint(0, vocabulary, (BATCH // engine.layout.data, TOKENS), generator=generator)
    engine.step({"input_ids": ids})
    engine.update()


def ours(job: dict[str, Any]) -> None:
    """Way a: switches there and back, cold first, then prepared with cached groups; and the wire's time for d."""
    from copus_lightning.core.layout import Configuration, Layout

    results: dict[str, Any] = {}
    there = Configuration(Layout.parse(job["target"]), BATCH, MICRO)
    back = Configuration(Layout.parse(job["source"]), BATCH, MICRO)
    for name, cached in (("cold", False), ("warm", True)):
        engine = make_engine(job, job["source"], cache_groups=cached)
        step(engine)
        pauses, reports, wire = [], [], []
        if cached:  # groups of both layouts exist from here on
            engine.switch(there)
            engine.switch(back)
        for _ in range(job["repeats"]):
            if cached:
                engine.prepare(there)
                while not engine.prepared:
                    step(engine)
                step(engine)
            dist.barrier()
            started = time.perf_counter()
            report = engine.switch(there)
            pauses.append(slowest([time.perf_counter() - started])[0])
            phases = sorted(report.seconds)
            reports.append(dict(zip(phases, slowest([report.seconds[p] for p in phases]), strict=True)))
            step(engine)
            results["bytes_moved"], results["bytes_lower_bound"] = (
                report.bytes_moved,
                report.bytes_lower_bound,
            )
            results["host_peak_over_state"] = slowest([report.host_peak_bytes / max(report.state_bytes, 1)])[
                0
            ]
            received = int(slowest([float(report.bytes_received)])[0])
            wire.append(statistics.median(wire_seconds(received) for _ in range(3)))
            engine.switch(back)
            step(engine)
        breakdown = {p: statistics.median(r[p] for r in reports) for p in reports[0]}
        results[name] = {
            "pause": statistics.median(pauses),
            "exchange": breakdown["exchange"],
            "breakdown": breakdown,
        }
        results["parameters"] = sum(t.numel for t in engine.assembler.state_map.tensors)
        engine.close()
    # Each switch of the last engine is compared with the wire right after it: the machine's speed drifts.
    results["bound_seconds"] = statistics.median(wire)
    for name, spent in (("exchange", [r["exchange"] for r in reports]), ("pause", pauses)):
        ratios = [seconds / bound for seconds, bound in zip(spent, wire, strict=True)]
        results[f"{name}_over_bound"] = statistics.median(ratios)
        results[f"{name}_over_bound_range"] = [min(ratios), max(ratios)]
    results["gigabytes_per_second"] = received / results["bound_seconds"] / 1e9
    write(job, "ours", results)


def wire_seconds(n_bytes: int) -> float:
    """Seconds in which every rank receives so many bytes from a neighbour and sends as many to it, and nothing else."""
    peer = dist.get_rank() ^ 1
    payload, incoming = torch.ones(n_bytes // 4), torch.zeros(n_bytes // 4)
    operations = [dist.P2POp(dist.irecv, part, peer) for part in incoming.split(MESSAGE)]
    operations += [dist.P2POp(dist.isend, part, peer) for part in payload.split(MESSAGE)]
    dist.barrier()
    started = time.perf_counter()
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return slowest([time.perf_counter() - started])[0]


def save(job: dict[str, Any]) -> None:
    """Way b, first half."""
    from copus_lightning.engine.checkpoint import Checkpointer

    engine = make_engine(job, job["source"])
    step(engine)
    dist.barrier()
    started = time.perf_counter()
    Checkpointer(engine).save(Path(job["folder"], "checkpoint"), {})
    dist.barrier()
    write(job, "save", {"seconds": time.perf_counter() - started})
    engine.close()


def resume(job: dict[str, Any]) -> None:
    """Way b, second half."""
    from copus_lightning.engine.checkpoint import Checkpointer

    engine = make_engine(job, job["target"])
    Checkpointer(engine).load(Path(job["folder"], "checkpoint"))
    step(engine)
    engine.close()


# -- DeepSpeed alone ------------------------------------------------------------------------------------------


def deepspeed_engine(job: dict[str, Any], layout: str, universal: bool) -> Any:
    """The same model as DeepSpeed's own pipeline module, in bf16 with ZeRO-1 and AdamW."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from torch import nn
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
    )

    from copus_lightning.core.layout import Layout

    config = LlamaConfig(**job["model"])
    config._attn_implementation = "sdpa"
    sizes = Layout.parse(layout)
    assert sizes.tensor == 1, "DeepSpeed's way is measured without tensor parallelism"

    class Decoder(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.layer, self.rotary = LlamaDecoderLayer(config, index), LlamaRotaryEmbedding(config)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(hidden.shape[1])[None]
            out = self.layer(
                hidden, position_embeddings=self.rotary(hidden, positions), position_ids=positions
            )
            return out if torch.is_tensor(out) else out[0]

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.norm(hidden))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())

    layers = [LayerSpec(nn.Embedding, config.vocab_size, config.hidden_size)]
    layers += [LayerSpec(Decoder, i) for i in range(config.num_hidden_layers)] + [LayerSpec(Head)]
    topology = PipeModelDataParallelTopology(num_pp=sizes.pipeline, num_mp=1, num_dp=sizes.data)
    net = PipelineModule(layers=layers, topology=topology, loss_fn=loss, partition_method="uniform")
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": BATCH // MICRO // sizes.data,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    return engine


def deepspeed_step(job: dict[str, Any], engine: Any) -> None:
    """One optimizer step on made-up tokens."""
    generator = torch.Generator().manual_seed(0)
    batches = BATCH // MICRO // engine.grid.data_parallel_size
    ids = [
        torch.randint(0, job["model"]["vocab_size"], (MICRO, TOKENS), generator=generator)
        for _ in range(batches)
    ]
    engine.train_batch(iter([(x, x) for x in ids]))


def deepspeed_save(job: dict[str, Any]) -> None:
    """Way c, first part."""
    engine = deepspeed_engine(job, job["source"], universal=False)
    deepspeed_step(job, engine)
    dist.barrier()
    started = time.perf_counter()
    folder = Path(job["folder"], "deepspeed")
    engine.save_checkpoint(str(folder), tag="step1")
    dist.barrier()
    seconds = time.perf_counter() - started
    write(job, "deepspeed-save", {"seconds": seconds, "checkpoint": str(folder / "step1")})


def deepspeed_resume(job: dict[str, Any]) -> None:
    """Way c, last part."""
    engine = deepspeed_engine(job, job["target"], universal=True)
    engine.load_checkpoint(str(Path(job["folder"], "universal")), tag="u", load_optimizer_states=True)
    deepspeed_step(job, engine)


ROLES = {
    "ours": ours,
    "save": save,
    "resume": resume,
    "deepspeed-save": deepspeed_save,
    "deepspeed-resume": deepspeed_resume,
}


def main() -> None:
    role, path = sys.argv[1:3]
    torch.set_num_threads(1)
    job = json.loads(Path(path).read_text())
    if role.startswith("deepspeed"):
        import os

        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    ROLES[role](job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
