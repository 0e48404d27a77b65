"""The loader in the hands of Lightning: what Fabric and Trainer do to a dataloader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.wrappers import _FabricDataLoader
from torch.utils.data import DataLoader

from copus_lightning.data.loader import ElasticDataLoader


class Recorder(pl.LightningModule):
    """Keeps the sample ids that it trained on, and changes the batch after the third step."""

    def __init__(self, loader: ElasticDataLoader, grow_to: int = 4) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.loader = loader
        self.grow_to = grow_to
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += batch.tolist()
        return self.weight * batch.float().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.loader.reconfigure(global_batch_size=self.grow_to)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def elastic(num_workers: int = 2, **kwargs: Any) -> ElasticDataLoader:
    loader: DataLoader = DataLoader(range(40), num_workers=num_workers, **kwargs)  # type: ignore[arg-type]
    return ElasticDataLoader(loader, 0, 1, 2, 0)


def trainer(folder: Path, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def test_fabric_wrapper_iterates_and_follows_a_reconfiguration(children: Callable[[], set[int]]) -> None:
    loader = elastic()
    # What Fabric.setup_dataloaders wraps around whatever the strategy returned.
    wrapped = _FabricDataLoader(loader, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert (len(wrapped), wrapped.num_workers, wrapped.dataset) == (20, 2, range(40))
    seen = []
    for batch in wrapped:
        seen += batch.tolist()
        if len(seen) == 6:
            loader.reconfigure(global_batch_size=4)
    assert seen == list(range(38)) and loader.position == 38
    assert not children()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_trainer_uses_each_sample_once_and_resumes(
    tmp_path: Path, persistent_workers: bool, children: Callable[[], set[int]]
) -> None:
    loader = elastic(persistent_workers=persistent_workers)
    first = Recorder(loader)
    fit = trainer(tmp_path, max_steps=5, enable_checkpointing=False)
    fit.fit(first, loader)
    assert first.seen == list(range(14)) and loader.position == 14
    assert not children()
    fit.save_checkpoint(tmp_path / "half.ckpt")

    resumed_loader = elastic(num_workers=0)
    resumed_loader.reconfigure(global_batch_size=4)
    resumed = Recorder(resumed_loader)
    trainer(tmp_path, max_steps=8, enable_checkpointing=False).fit(
        resumed, resumed_loader, ckpt_path=str(tmp_path / "half.ckpt")
    )
    assert resumed.seen == list(range(14, 26))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("grow_to", "n_seen"), [(1, 23 + 17 + 20), (4, 120 - 2)])
def test_trainer_goes_on_over_epochs_of_changing_length(tmp_path: Path, grow_to: int, n_seen: int) -> None:
    """Trainer fixes the steps of an epoch at the start: a smaller batch ends it early and loses nothing."""
    loader = elastic(num_workers=0)
    recorder = Recorder(loader, grow_to)
    trainer(tmp_path, max_epochs=3, enable_checkpointing=False).fit(recorder, loader)
    assert recorder.seen == [index % 40 for index in range(len(recorder.seen))]
    assert len(recorder.seen) == n_seen
