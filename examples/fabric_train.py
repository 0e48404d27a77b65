"""An ordinary Fabric script that trains a small Llama on the byte corpus. Lines marked `# copus` are what
copus-lightning adds; what it takes away is the accumulation loop, since one batch is one optimizer step.

    python examples/fabric_train.py                                    # the batch follows the noise scale
    # and batch and layout follow Goodput:
    python examples/fabric_train.py --profile runs/demo/profile.json --micro-batch-size 2

`copus profile --config configs/demo.yaml` measures a profile of this model on this machine.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from copus_lightning import CopusCallback, CopusStrategy  # copus
from copus_lightning.data.corpus import byte_corpus

SEQUENCE_LENGTH = 32


def build_model(hidden_size: int = 384) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=hidden_size,
        intermediate_size=1024 * hidden_size // 384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=80)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--run-dir", default="runs/fabric")
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
        reference_batch_size=16,  # copus: at which the learning rate below was tuned
        run_dir=args.run_dir,  # copus
    )  # copus
    fabric = L.Fabric(
        accelerator="cpu",
        devices=args.devices,
        strategy=CopusStrategy(layout=args.layout, micro_batch_size=args.micro_batch_size),  # copus
        callbacks=[copus],  # copus
        loggers=[CSVLogger(args.run_dir, name="csv", flush_logs_every_n_steps=1)],
    )
    fabric.launch()

    model = build_model(args.hidden_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model, optimizer = fabric.setup(model, optimizer)
    training = DataLoader(byte_corpus(SEQUENCE_LENGTH), batch_size=4, shuffle=True)
    validation = DataLoader(byte_corpus(SEQUENCE_LENGTH, "validation"), batch_size=8)
    training, validation = fabric.setup_dataloaders(training, validation)

    for step, batch in enumerate(training, start=1):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0 or step == args.max_steps:
            fabric.print(f"step {step:4d}  loss {loss.item():.3f}")
            fabric.print(f"           next: {fabric.strategy.configuration}")  # copus
        if step >= args.max_steps:
            break

    model.eval()
    losses = [model(**batch).loss.item() for _, batch in zip(range(8), validation, strict=False)]
    fabric.print(f"validation loss {sum(losses) / len(losses):.3f} nats per byte")


if __name__ == "__main__":
    main()
