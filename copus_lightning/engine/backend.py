"""DeepSpeed, loaded late and for one device type.

DeepSpeed picks its accelerator when it is first imported, from an environment variable. Importing it here, on
first use, lets the strategy's device decide, and leaves the user's environment as it was.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for the duration of the block, and restores what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def quiet(prints: bool = True) -> Iterator[None]:
    """Silences DeepSpeed's logger, and with ``prints`` standard output, for the duration of the block."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if prints:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                yield
        else:
            yield
    finally:
        logger.setLevel(level)


def load_deepspeed(device: torch.device) -> None:
    """Imports DeepSpeed for ``device`` and ties its communication layer to the running WORLD group.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or DeepSpeed was imported before for another
            kind of device.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call fabric.launch() before fabric.setup()")
    with environment(DS_ACCELERATOR=device.type), quiet():
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator
    # DeepSpeed still calls collectives by names that torch has renamed; users can do nothing about it.
    warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)
    chosen = get_accelerator().device_name()
    if chosen.split(":")[0] != device.type:
        raise RuntimeError(
            f"DeepSpeed was imported for {chosen!r} before the strategy chose {device.type!r}: "
            f"set DS_ACCELERATOR={device.type} before importing deepspeed"
        )
    if comm.comm.cdb is not None and comm.comm.cdb.is_initialized():
        return
    # The shared-memory operation that DeepSpeed would compile with g++ serves its inference all-reduce alone.
    module = importlib.import_module("deepspeed.comm.torch")
    build_shm_op = module.build_shm_op
    setattr(module, "build_shm_op", lambda: None)  # noqa: B010
    try:
        with environment(LOCAL_RANK=os.environ.get("LOCAL_RANK", "0")), quiet():
            comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    finally:
        setattr(module, "build_shm_op", build_shm_op)  # noqa: B010
