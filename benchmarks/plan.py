"""Time and memory that one rank takes to plan a layout change of a 70B Llama over 1,024 ranks.

    python benchmarks/plan.py [--output FILE] [--ranks RANK ...]

Every case (a layout change, a ZeRO stage, a rank) runs in a fresh process on one core.

- `seconds`: wall-clock time of making the description of the tensors and the plan of one rank.
- `megabytes`: what the same adds to the process's resident memory, in 1e6 bytes: the peak after it, minus
  what was resident before it. All that the operating system has to find counts; only the interpreter and the
  imports, which a training process has anyway, are left out.

Both are printed for each case; FILE gets the worst of them as JSON, with the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

# Runs from a checkout as well as from an installed package.
sys.path.insert(0, str(Path(__file__).parents[1]))

from copus_lightning.core.layout import Layout
from copus_lightning.engine.exchange import plan
from copus_lightning.engine.state import LogicalTensor, StateMap

CHANGES = [
    ("dp16-tp8-pp8", "dp32-tp4-pp8"),
    ("dp16-tp8-pp8", "dp64-tp4-pp4"),
    ("dp64-tp4-pp4", "dp16-tp8-pp8"),
    # Far apart: many peers, many replicas, every tensor on every rank.
    ("dp16-tp8-pp8", "dp128-tp8-pp1"),
    ("dp128-tp8-pp1", "dp1024-tp1-pp1"),
    ("dp2-tp8-pp64", "dp1024-tp1-pp1"),
    ("dp1024-tp1-pp1", "dp2-tp8-pp64"),
]
RANKS = [0, 517, 1023]
RANKS_PER_NODE = 8


def llama_70b(zero_stage: int) -> StateMap:
    """The 723 parameters of a 70B Llama 3, weight matrices and norms in groups of their own."""
    hidden, intermediate, key_value, vocabulary, n_layers = 8192, 28672, 8 * 128, 128256, 80
    tensors = [LogicalTensor("embed_tokens", (vocabulary, hidden), 0, on_first=True)]
    for layer in range(n_layers):
        for name, shape, shard_dim in (
            ("q_proj", (hidden, hidden), 0),
            ("k_proj", (key_value, hidden), 0),
            ("v_proj", (key_value, hidden), 0),
            ("o_proj", (hidden, hidden), 1),
            ("gate_proj", (intermediate, hidden), 0),
            ("up_proj", (intermediate, hidden), 0),
            ("down_proj", (hidden, intermediate), 1),
        ):
            tensors.append(LogicalTensor(f"layers.{layer}.{name}", shape, shard_dim, layer))
        for name in ("input_norm", "post_attention_norm"):
            tensors.append(LogicalTensor(f"layers.{layer}.{name}", (hidden,), None, layer, group=1))
    tensors.append(LogicalTensor("norm", (hidden,), None, on_last=True, group=1))
    tensors.append(LogicalTensor("lm_head", (vocabulary, hidden), 0, on_last=True))
    return StateMap(tuple(tensors), n_layers, zero_stage)


def resident_bytes(peak: bool) -> int:
    """Resident memory of this process: the most so far, or now."""
    status = Path("/proc/self/status")
    if status.exists():
        key = "VmHWM:" if peak else "VmRSS:"
        return next(
            int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(key)
        )
    # Elsewhere only the peak is at hand without another package; before the work it is close to the present.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(source: str, target: str, zero_stage: int, rank: int) -> dict[str, object]:
    """Plan for one rank in this process.

    Returns:
        The case, its wall-clock seconds, its megabytes and what the plan comes to (elements of one state).
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = resident_bytes(peak=False)
    start = time.perf_counter()
    result = plan(llama_70b(zero_stage), Layout.parse(source), Layout.parse(target), rank, RANKS_PER_NODE)
    seconds = time.perf_counter() - start
    return {
        "source": source,
        "target": target,
        "zero_stage": zero_stage,
        "rank": rank,
        "seconds": seconds,
        "megabytes": (resident_bytes(peak=True) - before) / 1e6,
        "moves": sum(map(len, (result.keeps, *result.sends.values(), *result.receives.values()))),
        "peers": len(result.sends.keys() | result.receives.keys()),
        "received_elements": result.received_elements,
    }


def main() -> None:
    """Run every case in a process of its own, print the figures and write the worst."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="ranks to plan for")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        source, target, zero_stage, rank = arguments.case
        print(json.dumps(measure(source, target, int(zero_stage), int(rank))))
        return

    cases = []
    print(f"{'change':32} {'zero':>4} {'rank':>5} {'seconds':>8} {'MB':>6} {'moves':>6} {'peers':>6}")
    for source, target in CHANGES:
        for zero_stage in (0, 1):
            for rank in arguments.ranks:
                command = [sys.executable, __file__, "--case", source, target, str(zero_stage), str(rank)]
                case = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                cases.append(case)
                print(
                    f"{source + ' -> ' + target:32} {zero_stage:4} {rank:5} {case['seconds']:8.3f}"
                    f" {case['megabytes']:6.1f} {case['moves']:6} {case['peers']:6}"
                )
    figures = {
        "seconds": max(case["seconds"] for case in cases),
        "megabytes": max(case["megabytes"] for case in cases),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one core",
        "cases": cases,
    }
    print(f"worst: {figures['seconds']:.3f} s, {figures['megabytes']:.1f} MB added at the peak")
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
