"""A tiny model and dataset, plans of switches, and what a plain single-process PyTorch loop makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from copus_lightning.core.decision import Decision, Observation, Policy
from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.data.sampler import GlobalOrder

VOCABULARY, N_TOKENS = 97, 16
LEARNING_RATE = 1e-2
WARM_UP_STEPS = 4

Weights = dict[str, torch.Tensor]


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, of which the first two spell the sample's own index."""

    def __init__(self, n_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, VOCABULARY, (n_samples, N_TOKENS), generator=generator)
        index = torch.arange(n_samples)
        self.ids[:, 0], self.ids[:, 1] = index // VOCABULARY, index % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


def indices(batch: dict[str, torch.Tensor]) -> list[int]:
    """Which samples a batch holds."""
    return [int(a) * VOCABULARY + int(b) for a, b in batch["input_ids"][:, :2]]


def build_model(tied: bool = False) -> Any:
    """The same weights each time, and the caller's random numbers as they were."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=N_TOKENS,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def build_optimizer(model: Any) -> torch.optim.AdamW:
    """Two param groups, with and without weight decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up, then decay: another rate in each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)


def rate_factor(step: int) -> float:
    """Of the scheduler, in the step after ``step`` others."""
    return min((step + 1) / WARM_UP_STEPS, 1.0) * 0.97**step


@dataclass
class Curve:
    """What a run leaves behind.

    Attributes:
        losses: Of each step, mean over the global batch.
        norms: Global gradient norm of each step, before clipping.
        samples: Indices of this data rank's samples, by step.
        rates: The user's learning rate in each step, first param group.
        configurations: What each step ran in.
        weights: After the last step, whole.
        extra: Whatever else a test wants to know.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    configurations: list[Configuration] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def assert_messages(by_rank: list[Any], expected: dict[str, str]) -> None:
    """Each rank has a message of one line under each name, with these words in it; none where there are no words."""
    for name, words in expected.items():
        for messages in by_rank:
            assert words in messages[name] if words else not messages[name], f"{name}: {messages[name]!r}"
            assert "\n" not in messages[name]


def global_batches(curves: list[Curve]) -> list[list[int]]:
    """The samples of each global batch, in order, after a check of sizes and that peers saw the same."""
    batches = []
    for step, configuration in enumerate(curves[0].configurations):
        by_data_rank: dict[int, list[int]] = {}
        for rank, curve in enumerate(curves):
            assert curve.configurations[step] == configuration
            data_rank = configuration.layout.coordinates(rank).data
            seen = by_data_rank.setdefault(data_rank, curve.samples[step])
            assert seen == curve.samples[step], f"step {step}: rank {rank} differs from its peers"
        batches.append([i for data_rank in sorted(by_data_rank) for i in by_data_rank[data_rank]])
        assert len(batches[-1]) == configuration.global_batch_size
    return batches


def assert_each_once_and_in_order(batches: list[list[int]], order: GlobalOrder) -> None:
    flat = [index for batch in batches for index in batch]
    assert flat == [order.index(position) for position in range(len(flat))]


def plain_pytorch(
    dataset: Samples,
    batches: list[list[int]],
    edit: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
    factor: Callable[[int], float] = lambda step: 1.0,
    loss_scale: float = 1.0,
    max_norm: float | None = None,
    validation: Samples | None = None,
) -> Curve:
    """A plain loop in one process, one batch per optimizer step.

    Args:
        batches: Sample indices of each step.
        edit: What the user does to the optimizer before a step.
        factor: On the learning rate of a step, for that step alone.
        validation: Its loss after each step becomes ``extra["val_loss"]``.
    """
    model = build_model()
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    curve = Curve()
    for step, batch in enumerate(batches):
        edit(step, optimizer)
        ids = dataset.ids[batch]
        loss = model(input_ids=ids, labels=ids).loss
        (loss * loss_scale).backward()
        curve.losses.append(loss.item())
        limit = float("inf") if max_norm is None else max_norm
        curve.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        rates = [group["lr"] for group in optimizer.param_groups]
        curve.rates.append(rates[0])
        for group in optimizer.param_groups:
            group["lr"] *= factor(step)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        scheduler.step()
        if validation is not None:
            with torch.no_grad():
                loss = model(input_ids=validation.ids, labels=validation.ids).loss
            curve.extra.setdefault("val_loss", []).append(loss.item())
    curve.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return curve


def assert_same_weights(have: Weights, want: Weights, tolerance: float = 2e-5) -> None:
    assert have.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(have[name], value, rtol=tolerance, atol=tolerance, msg=name)


class Scripted(Policy):
    """Goes from each configuration of a list to the next, at every decision."""

    def __init__(self, *route: Configuration) -> None:
        self.route = route

    def decide(self, observation: Observation) -> Decision:
        place = self.route.index(observation.configuration)
        return Decision(self.route[place + 1] if place + 1 < len(self.route) else None, "scripted")


def distinct(configurations: list[Configuration]) -> list[Configuration]:
    """The configurations that a run went through, each stretch once."""
    return [c for i, c in enumerate(configurations) if i == 0 or c != configurations[i - 1]]


def configuration(text: str, global_batch_size: int, micro_batch_size: int = 1) -> Configuration:
    return Configuration(Layout.parse(text), global_batch_size, micro_batch_size)


def by_step(first: Configuration, switches: dict[int, Configuration], n_steps: int) -> list[Configuration]:
    """What each step runs in, if the run begins in ``first`` and switches after so many steps."""
    configurations = [first]
    for step in range(1, n_steps):
        configurations.append(switches.get(step, configurations[-1]))
    return configurations
