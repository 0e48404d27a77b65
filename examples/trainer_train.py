"""An ordinary Trainer script that trains a small Llama on the byte corpus. Lines marked `# copus` are what
copus-lightning adds. One batch is one optimizer step, so `accumulate_grad_batches` stays at 1.

    python examples/trainer_train.py                                    # the batch follows the noise scale
    # and batch and layout follow Goodput:
    python examples/trainer_train.py --profile runs/demo/profile.json --micro-batch-size 2

`copus profile --config configs/demo.yaml` measures a profile of this model on this machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from copus_lightning import CopusCallback, CopusTrainerStrategy  # copus
from copus_lightning.data.corpus import byte_corpus

SEQUENCE_LENGTH = 32


class LanguageModel(L.LightningModule):
    def __init__(self, hidden_size: int = 384) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=hidden_size,
            intermediate_size=1024 * hidden_size // 384,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=80)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--run-dir", default="runs/trainer")
    parser.add_argument("--profile", help="measured throughput: the layout changes too")  # copus
    parser.add_argument("--micro-batch-size", type=int, default=1, help="to begin with")  # copus
    parser.add_argument("--layout", help="where to begin, like dp1-tp1-pp2")  # copus
    args = parser.parse_args()

    L.seed_everything(1, verbose=False)
    copus = CopusCallback(  # copus
        profile=args.profile,  # copus
        policy="copus" if args.profile else "critical_batch",  # copus
        global_batch_sizes=[4, 8, 16, 32],  # copus
        decide_every_tokens=2_048,  # copus
        reference_batch_size=16,  # copus: at which the learning rate above was tuned
        run_dir=args.run_dir,  # copus
    )  # copus
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=CopusTrainerStrategy(layout=args.layout, micro_batch_size=args.micro_batch_size),  # copus
        callbacks=[copus],  # copus
        logger=CSVLogger(args.run_dir, name="csv"),
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=args.max_steps // 2,
        limit_val_batches=8,
        enable_checkpointing=False,
        enable_model_summary=False,  # copus: it would count a stand-in
    )
    training = DataLoader(byte_corpus(SEQUENCE_LENGTH), batch_size=4, shuffle=True)
    validation = DataLoader(byte_corpus(SEQUENCE_LENGTH, "validation"), batch_size=8)
    trainer.fit(LanguageModel(args.hidden_size), training, validation)
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
