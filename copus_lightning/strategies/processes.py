"""Processes, devices and collectives, the same for Lightning's two kinds of parallel strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only

from copus_lightning.strategies.session import Session

DEFAULT_TIMEOUT_SECONDS = 1800.0


class Processes:
    """Mixed into a parallel strategy of Fabric or of Trainer, which bring devices and cluster environment."""

    session: Session
    parallel_devices: Any
    cluster_environment: Any
    local_rank: int
    global_rank: int
    node_rank: int
    _num_nodes: int = 1
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    process_group_backend: str | None = None

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes of the run; Lightning sets it."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def planned_world_size(self) -> int:
        """Ranks of the run, known before any is launched."""
        return self._num_nodes * self.num_processes

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.planned_world_size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def connect_processes(self) -> None:
        """Joins the WORLD group, which lives as long as the process.

        Unless ``OMP_NUM_THREADS`` says otherwise, the cores are shared out among the ranks of this node before:
        left alone, each rank would start a thread for every core.
        """
        _set_num_threads_if_needed(self.num_processes)
        self._set_world_ranks()
        backend = self.process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        # No device_id: with it NCCL splits the WORLD's communicator for each new group, in which no other work may
        # be under way, and a layout's groups are made while training goes on.
        timeout = timedelta(seconds=self.timeout_seconds)
        _init_dist_connection(self.cluster_environment, backend, timeout=timeout)

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None: samples are chosen by global position (:mod:`copus_lightning.data`), not by a fixed sampler."""
        return None

    def naming_lost_rank(self) -> AbstractContextManager[None]:
        """As :meth:`Session.naming_lost_rank`."""
        return self.session.naming_lost_rank()

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks; anything else is returned as it is."""
        if isinstance(tensor, torch.Tensor):
            with self.naming_lost_rank():
                return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            with self.naming_lost_rank():
                dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Sends an object of rank ``src`` to all."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        with self.naming_lost_rank():
            dist.broadcast_object_list(box, src)
        return box[0]
