"""Where a run takes place, and the Fabric that launches it.

The other ranks of this machine are started by Lightning, which runs the command line once more for each;
under torchrun and SLURM they are there already.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from copus_lightning.config import Config, ConfigError, RunConfig
from copus_lightning.core.layout import Configuration


@dataclass(frozen=True)
class Place:
    """The ranks of a run, known before any is launched.

    Args:
        accelerator: `cpu` or `cuda`.
        devices: Ranks per node.
        num_nodes: Nodes.
    """

    accelerator: str
    devices: int
    num_nodes: int

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.devices * self.num_nodes

    @property
    def backend(self) -> str:
        """Of `torch.distributed`."""
        return "nccl" if self.accelerator == "cuda" else "gloo"

    @property
    def device(self) -> torch.device:
        """A device of the kind that ranks get."""
        return torch.device(self.accelerator, 0) if self.accelerator == "cuda" else torch.device("cpu")

    @classmethod
    def of(cls, run: RunConfig) -> Place:
        """The place that a configuration asks for, on this machine and under this launcher.

        Raises:
            ConfigError: There are not so many devices, or another number of ranks was launched.
        """
        n_gpus = torch.cuda.device_count()
        accelerator = run.accelerator
        if accelerator == "auto":
            accelerator = "cuda" if n_gpus else "cpu"
        accelerator = "cpu" if accelerator == "cpu" else "cuda"
        if accelerator == "cuda" and n_gpus == 0:
            raise ConfigError(f"run.accelerator: {run.accelerator} is asked for and no GPU is found: use cpu")
        launched = _launched()
        local = launched[0] if launched else (n_gpus if accelerator == "cuda" else 1)
        devices = local if isinstance(run.devices, str) else run.devices
        if accelerator == "cuda" and devices > n_gpus:
            raise ConfigError(
                f"run.devices: {devices} GPUs are asked for and {n_gpus} found: use at most {n_gpus}"
            )
        place = cls(accelerator, devices, run.num_nodes)
        if launched and launched[0] * launched[1] != place.world_size:
            raise ConfigError(
                f"run.devices: {devices} ranks on each of run.num_nodes={run.num_nodes} nodes, but"
                f" {launched[0] * launched[1]} ranks were launched: set devices={launched[0]},"
                f" num_nodes={launched[1]}"
            )
        return place


def _launched() -> tuple[int, int] | None:
    """Ranks per node and nodes of a launch by torchrun or SLURM; None if this command launches the ranks."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
        return local, world // local
    if (
        environment.get("SLURM_JOB_NAME") not in (None, "bash", "interactive")
        and "SLURM_NTASKS" in environment
    ):
        nodes = int(environment.get("SLURM_NNODES", "1"))
        return int(environment["SLURM_NTASKS"]) // nodes, nodes
    return None


def is_first_rank() -> bool:
    """Whether this process is, or will be, rank 0. Known before anything is launched."""
    environment = os.environ
    for key in ("RANK", "SLURM_PROCID") if _launched() else ("LOCAL_RANK", "NODE_RANK"):
        if int(environment.get(key, "0")) > 0:
            return False
    return True


def set_threads(place: Place) -> None:
    """Shares this machine's cores out among its ranks, unless OMP_NUM_THREADS says otherwise.

    Left alone, each rank would start a thread for every core. Ranks that are launched later inherit the
    variable.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // place.devices)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def make_fabric(
    config: Config,
    place: Place,
    configuration: Configuration,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
) -> Any:
    """A Fabric that starts in a configuration; the first one that is launched starts the other ranks."""
    from lightning.fabric import Fabric

    from copus_lightning.strategies.fabric import CopusStrategy

    strategy = CopusStrategy(
        layout=configuration.layout,
        global_batch_size=configuration.global_batch_size,
        micro_batch_size=configuration.micro_batch_size,
        zero_stage=config.parallel.zero_stage,
        gradient_clip_norm=config.run.gradient_clip_norm,
        timeout_seconds=config.parallel.timeout_seconds,
        seed=config.run.seed,
    )
    return Fabric(
        accelerator=place.accelerator,
        devices=place.devices,
        num_nodes=place.num_nodes,
        precision=config.run.precision,  # type: ignore[arg-type]
        strategy=strategy,
        callbacks=list(callbacks),
        loggers=list(loggers),
    )


@contextlib.contextmanager
def launched(fabric: Any) -> Iterator[None]:
    """Launches the ranks for the block, and ends those that are left if the block fails."""
    # What Lightning says while it connects ranks, and a note of torch to DeepSpeed, are not for our users.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    launcher = fabric.strategy.launcher
    try:
        fabric.launch()
        yield
    except BaseException:
        if launcher is not None and launcher.watch is not None:
            launcher.watch.end_ranks()
        raise
    finally:
        if launcher is not None and launcher.watch is not None:
            launcher.watch.stop()


def leave() -> None:
    """Ends the WORLD group once all ranks are done."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
