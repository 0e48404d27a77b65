"""What a change of layout costs: this package's switch against restarting from a checkpoint.

    python benchmarks/switch.py [--output FILE] [--ranks 2] [--parameters 40]

The same model makes the same change of layout in four ways, one after the other in one run:

a. `Engine.switch` in the running processes: with cached groups and the new layout prepared while training goes
   on, and cold, with nothing prepared and new groups;
b. restart from this package's own checkpoint: save, end the processes, start new ones, load, first step;
c. DeepSpeed's own way: save, convert to its universal format, start new processes, load, first step;
d. the physical bound: the time in which ranks exchange the bytes that the busiest one must receive and do nothing
   else, measured after each switch; the median, as of the switches.

Every figure is seconds until training goes on; ratios are what to read, since all four share the machine.

From stages to replicas under ZeRO-0 every rank must receive the state of all stages but its own: the change that
moves most. (Under ZeRO-1 the same change moves almost nothing, since a rank's partition of the flat state is nearly
its stage; that is measured too, as `zero1`.) DeepSpeed's universal format needs ZeRO-1, so that is what it gets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYOUTS = {2: ("dp1-tp1-pp2", "dp2-tp1-pp1"), 4: ("dp1-tp1-pp4", "dp4-tp1-pp1")}
HERE = Path(__file__).resolve().parent


def model_config(millions: int) -> dict[str, Any]:
    """A Llama of about so many million parameters."""
    hidden = {20: 384, 40: 512, 100: 768}[millions]
    return {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 16 * 16,
        "num_hidden_layers": {20: 8, 40: 10, 100: 12}[millions],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }


def launch(role: str, ranks: int, *arguments: str) -> float:
    """Runs this file's ``role`` on ``ranks`` processes; returns the wall seconds from start to end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONWARNINGS": "ignore",
    }
    environment |= {"MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    started = time.perf_counter()
    command = [sys.executable, str(HERE / "switch_roles.py"), role, *arguments]
    processes = []
    for rank in range(ranks):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL))
    codes = [p.wait(600) for p in processes]
    if any(codes):
        raise RuntimeError(f"{role} failed with exit codes {codes}")
    return time.perf_counter() - started


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--ranks", type=int, choices=sorted(LAYOUTS), default=2)
    parser.add_argument("--parameters", type=int, choices=(20, 40, 100), default=40, help="millions")
    parser.add_argument("--repeats", type=int, default=5, help="switches there and back")
    options = parser.parse_args()
    source, target = LAYOUTS[options.ranks]
    folder = Path(tempfile.mkdtemp(prefix="copus-switch-"))
    try:
        result = measure(options, source, target, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(result)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(options: argparse.Namespace, source: str, target: str, folder: Path) -> dict[str, Any]:
    """All four ways, and the ratios."""
    job = {
        "model": model_config(options.parameters),
        "source": source,
        "target": target,
        "folder": str(folder),
        "zero_stage": 0,
        "repeats": options.repeats,
    }
    (folder / "job.json").write_text(json.dumps(job))
    at = str(folder / "job.json")

    launch("ours", options.ranks, at)
    ours = json.loads((folder / "ours.json").read_text())
    (folder / "job1.json").write_text(json.dumps({**job, "zero_stage": 1}))
    launch("ours", options.ranks, str(folder / "job1.json"))
    zero1 = json.loads((folder / "ours.json").read_text())

    launch("save", options.ranks, at)
    saved = json.loads((folder / "save.json").read_text())
    restart = launch("resume", options.ranks, at)

    launch("deepspeed-save", options.ranks, at)
    deepspeed_saved = json.loads((folder / "deepspeed-save.json").read_text())
    started = time.perf_counter()
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    convert += [
        "--input_folder",
        deepspeed_saved["checkpoint"],
        "--output_folder",
        str(folder / "universal" / "u"),
    ]
    subprocess.run(
        convert,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    converted = time.perf_counter() - started
    deepspeed_restart = launch("deepspeed-resume", options.ranks, at)

    warm, cold = ours["warm"], ours["cold"]
    checkpoint_restart = saved["seconds"] + restart
    deepspeed_universal = deepspeed_saved["seconds"] + converted + deepspeed_restart
    return {
        "ranks": options.ranks,
        "parameters": ours["parameters"],
        "change": f"{source} -> {target}",
        "seconds": {
            "switch_prepared_cached": warm["pause"],
            "switch_cold": cold["pause"],
            "checkpoint_restart": checkpoint_restart,
            "deepspeed_universal": deepspeed_universal,
            "bound": ours["bound_seconds"],
        },
        "vs_deepspeed_universal": deepspeed_universal / warm["pause"],
        "vs_checkpoint_restart": checkpoint_restart / warm["pause"],
        "vs_checkpoint_restart_cold": checkpoint_restart / cold["pause"],
        **{k: v for k, v in ours.items() if "_over_bound" in k},
        "bytes_moved": ours["bytes_moved"],
        "bytes_lower_bound": ours["bytes_lower_bound"],
        "gigabytes_per_second": ours["gigabytes_per_second"],
        "breakdown": warm["breakdown"],
        "breakdown_cold": cold["breakdown"],
        "deepspeed_parts": {
            "save": deepspeed_saved["seconds"],
            "convert": converted,
            "start_load_first_step": deepspeed_restart,
        },
        "checkpoint_parts": {"save": saved["seconds"], "start_load_first_step": restart},
        "host_peak_over_state": ours["host_peak_over_state"],
        "zero1": {"pause": zero1["warm"]["pause"], "bytes_moved": zero1["bytes_moved"]},
    }


def report(result: dict[str, Any]) -> None:
    """Prints the figures for people."""
    print(f"{result['parameters'] / 1e6:.0f} M parameters, {result['ranks']} ranks, {result['change']}")
    for name, seconds in result["seconds"].items():
        print(f"  {name:26s} {seconds:9.3f} s")
    for name in ("vs_deepspeed_universal", "vs_checkpoint_restart", "vs_checkpoint_restart_cold"):
        print(f"  {name:26s} {result[name]:9.1f} x faster")
    for name in ("exchange_over_bound", "pause_over_bound"):
        low, high = result[f"{name}_range"]
        print(f"  {name:26s} {result[name]:9.2f} x the bound ({low:.2f}-{high:.2f})")
    moved, least = result["bytes_moved"], result["bytes_lower_bound"]
    print(f"  moved {moved / 1e6:.1f} MB, lower bound {least / 1e6:.1f} MB")
    print(f"  under ZeRO-1: {result['zero1']['pause']:.3f} s, {result['zero1']['bytes_moved'] / 1e6:.3f} MB")
    print("  breakdown:", {k: round(v, 4) for k, v in result["breakdown"].items()})


if __name__ == "__main__":
    main()
