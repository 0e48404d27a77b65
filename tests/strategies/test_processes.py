"""What the two faces share before any rank talks to another."""

from __future__ import annotations

import os

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import distributed

from copus_lightning import CopusStrategy, CopusTrainerStrategy
from copus_lightning.strategies import processes


@pytest.mark.parametrize("strategy_class", [CopusStrategy, CopusTrainerStrategy])
@pytest.mark.parametrize("chosen", [None, "3"])
def test_ranks_share_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, strategy_class: type, chosen: str | None
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(distributed, "_num_cpus_available", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(processes, "_init_dist_connection", lambda *args, **kwargs: None)
    monkeypatch.setattr(processes.rank_zero_only, "rank", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", chosen or "")  # so that it is taken back, whatever is done to it
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    strategy = strategy_class(
        parallel_devices=[torch.device("cpu")] * 4, cluster_environment=LightningEnvironment()
    )
    strategy.connect_processes()
    assert (set_to, os.environ["OMP_NUM_THREADS"]) == (([2], "2") if chosen is None else ([], chosen))
