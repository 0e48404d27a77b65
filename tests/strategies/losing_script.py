"""A plain script, whose second rank is killed in its third step; run by `test_rank_lost_script.py`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning as L
from strategy_runs import Samples, build_model, build_optimizer
from torch.utils.data import DataLoader

from copus_lightning import CopusStrategy, CopusTrainerStrategy

LIMITS: dict[str, Any] = {"layout": "dp2-tp1-pp1", "global_batch_size": 4, "timeout_seconds": 20.0}


def perhaps_die(step: int) -> None:
    if step == 2 and os.environ.get("LOCAL_RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def fabric() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=CopusStrategy(**LIMITS))
    fabric.launch()
    model = build_model()
    model, optimizer = fabric.setup(model, build_optimizer(model))
    for step, batch in enumerate(fabric.setup_dataloaders(DataLoader(Samples(400), batch_size=2))):
        loss = model(**batch).loss
        perhaps_die(step)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class Module(L.LightningModule):
    """What a user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        perhaps_die(batch_idx)
        return loss

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.model)


def trainer() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CopusTrainerStrategy(**LIMITS),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(400), batch_size=2))


if __name__ == "__main__":
    {"fabric": fabric, "trainer": trainer}[sys.argv[1]]()
