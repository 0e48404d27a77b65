"""Tiny models, batches and optimizers of the engine's tests, and what one process computes with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from copus_lightning.core.layout import Configuration, Layout
from copus_lightning.engine.engine import Engine, EngineSettings

N_SAMPLES, N_TOKENS = 8, 16
IGNORED = -100

# The slowest comes last, for those who leave it out.
LAYOUTS = {
    4: [
        Layout(data=4),
        Layout(data=2, tensor=2),
        Layout(data=2, pipeline=2),
        Layout(tensor=2, pipeline=2),
        Layout(pipeline=4),
        Layout(tensor=4),
    ],
    2: [Layout(data=2), Layout(tensor=2), Layout(pipeline=2)],
    1: [Layout()],
}
"""The layouts that are tested, by world size."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """A model of four layers. Neither its vocabulary nor its feed-forward width divides by 4, or 97 by 2."""

    tied: bool = False
    vocab_size: int = 97
    n_heads: int = 4
    n_kv_heads: int = 4
    family: str = "llama"
    options: tuple[tuple[str, Any], ...] = ()
    attention: str = "sdpa"

    def build(self) -> Any:
        """The model, with the same weights each time; norm weights are random, lest they all look alike."""
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": 32,
            "intermediate_size": 90,
            "num_hidden_layers": 4,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "max_position_embeddings": 64,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        }
        config = AutoConfig.for_model(self.family, **{**sizes, **dict(self.options)})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=self.attention)
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, 1.0, 0.1)
        return model


UNTIED, TIED = Tiny(), Tiny(tied=True)


def make_batch(kind: str = "plain", seed: int = 1, vocab_size: int = 97, n_samples: int = N_SAMPLES) -> Batch:
    """Samples of one step: `input_ids` and `labels`, (samples, tokens).

    Args:
        kind: "plain", every token is a target; "uneven", numbers of targets differ and the first two samples
            have none; "padded", uneven with an attention mask; "masked", no sample has a target; "counting",
            uneven, and each token is the one before plus 1, which is soon learned.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (n_samples, N_TOKENS), generator=generator)
    if kind == "counting":
        ids = (ids[:, :1] + torch.arange(N_TOKENS)) % vocab_size
    labels = ids.clone()
    batch = {"input_ids": ids, "labels": labels}
    if kind in ("uneven", "padded", "counting"):
        labels[:2] = IGNORED
        labels[3, 5:] = IGNORED
        labels[6, :9] = IGNORED
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][3, 5:] = 0
        batch["attention_mask"][5, 12:] = 0
        labels[5, 12:] = IGNORED
    if kind == "masked":
        labels[:] = IGNORED
    return batch


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Some samples of a batch."""
    return {key: value[start:stop] for key, value in batch.items()}


def share(engine: Engine, batch: Batch) -> Batch:
    """The samples of a global batch that belong to this data rank."""
    size = engine.configuration.data_rank_batch_size
    start = engine.coordinates.data * size
    return rows(batch, start, start + size)


# -- optimizers --------------------------------------------------------------------------------------------


class Lion(Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                b1, b2 = group["betas"]
                direction = torch.sign(momentum * b1 + p.grad * (1 - b1))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.mul_(b2).add_(p.grad, alpha=1 - b2)


def make_optimizer(kind: str, model: Any) -> Optimizer:
    """An optimizer with two param groups: matrices decay, vectors (listed first) do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=3e-3)
    if kind == "lion":
        return Lion(groups, lr=3e-4)
    assert kind == "sgd"
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


# -- engines -----------------------------------------------------------------------------------------------


@contextmanager
def running(
    layout: Layout,
    tiny: Tiny = UNTIED,
    kind: str = "adamw",
    micro_batch_size: int = 1,
    global_batch_size: int = N_SAMPLES,
    optimizer: Optimizer | None = None,
    model: Any = None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine, closed at the end."""
    model = tiny.build() if model is None else model
    optimizer = make_optimizer(kind, model) if optimizer is None else optimizer
    configuration = Configuration(layout, global_batch_size, micro_batch_size)
    engine = Engine(model, optimizer, configuration, EngineSettings(**settings), torch.device("cpu"))
    try:
        yield engine
    finally:
        engine.close()


def train(engine: Engine, batches: list[Batch]) -> list[float]:
    """Losses of some steps."""
    losses = []
    for batch in batches:
        losses.append(engine.step(share(engine, batch)).item())
        assert engine.update().applied
    return losses


def gathered(engine: Engine, key: str = "master") -> dict[str, torch.Tensor]:
    """Whole tensors of a state key or of the gradient, of which all replicas are checked to be the same."""
    whole = engine.gather(key)
    live = engine.live
    assert live is not None
    gradients = live.optimizer.gradients() if key == "gradient" else {}
    for piece in live.pieces:
        name = live.name(piece)
        if name not in whole:
            continue
        shard = _shard(engine, piece.tensor, whole[name])[piece.flat_start : piece.flat_stop]
        if key == "gradient":
            mine = gradients[name].detach().reshape(-1)[piece.flat_start : piece.flat_stop]
        else:
            mine = live.optimizer.storage(piece, name, key)
        assert torch.equal(shard, mine), f"rank {engine.rank}: {key} of {name} is not what other ranks have"
    return whole


def _shard(engine: Engine, tensor: int, whole: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, flat."""
    logical = engine.assembler.state_map.tensors[tensor]
    low, high = logical.shard_columns(engine.layout.tensor, engine.coordinates.tensor)
    return whole.reshape(logical.matrix_shape)[:, low:high].reshape(-1)


def state(engine: Engine) -> dict[str, torch.Tensor]:
    """Masters and moments as whole tensors, and step counts: by `key/name`, or `key/group i`.

    Checks on the way that all replicas are the same, and that the weights are their masters, rounded.
    """
    assert engine.live is not None
    parameters = engine.live.optimizer.parameters
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, engine.live.optimizer.scalars())
    scalars = {f"{key}/group {i}": v for mine in everyone for i, s in mine.items() for key, v in s.items()}
    whole = {name: torch.as_tensor(value) for name, value in scalars.items()}
    masters = gathered(engine)
    for index, tensor in enumerate(engine.assembler.state_map.tensors):
        if tensor.name in parameters:
            weight = parameters[tensor.name].detach().reshape(-1)
            assert torch.equal(weight, _shard(engine, index, masters[tensor.name]).to(weight.dtype)), (
                tensor.name
            )
    whole.update({f"master/{name}": value for name, value in masters.items()})
    if any(everyone):
        for key in dict.fromkeys(k for schema in engine.assembler.handle.schemas for k in schema.elementwise):
            whole.update({f"{key}/{name}": value for name, value in gathered(engine, key).items()})
    return whole


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names under which two states are not bit-identical."""
    names = one.keys() | other.keys()
    return sorted(k for k in names if not (k in one and k in other and same(one[k], other[k])))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit-identical and finite: what no rank had would come out of a gather as infinite."""
    return torch.equal(one, other) and bool(torch.isfinite(one).all())


# -- one process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What autograd computes in one process."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    n_targets: int


@cache
def reference(tiny: Tiny, kind: str, start: int = 0, stop: int = N_SAMPLES, seed: int = 1) -> Reference:
    """Loss and gradient of samples [start, stop) of a batch, by the model's own loss."""
    batch = rows(make_batch(kind, seed, tiny.vocab_size), start, stop)
    n_targets = int((batch["labels"][:, 1:] != IGNORED).sum())
    model = tiny.build()
    if n_targets == 0:
        return Reference(0.0, {n: torch.zeros_like(p) for n, p in model.named_parameters()}, 0.0, 0)
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    square = sum(g.double().square().sum().item() for g in gradients.values())
    return Reference(loss.item(), gradients, math.sqrt(square), n_targets)


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error over tensors, by norm, and where it is."""
    assert found.keys() == expected.keys()
    # Some gradients are 0 but for rounding, such as those of keys' biases: relative to what others are.
    least = 1e-3 * max(value.norm() for value in expected.values())
    errors = {n: ((found[n] - expected[n]).norm() / max(expected[n].norm(), least)).item() for n in expected}
    return max((error if error == error else math.inf, name) for name, error in errors.items())


def train_alone(kind: str, batches: list[Batch], clip: float | None, tiny: Tiny = UNTIED) -> list[float]:
    """Losses of an ordinary training loop in one process."""
    model = tiny.build()
    optimizer = make_optimizer(kind, model)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulating(layout: Layout, accumulation: int) -> Configuration:
    """`accumulation` micro-batches per data rank, of `N_SAMPLES` samples or of these taken several times."""
    times = next(t for t in (1, 2, 4) if t * N_SAMPLES % (layout.data * accumulation) == 0)
    return Configuration(layout, times * N_SAMPLES, times * N_SAMPLES // (layout.data * accumulation))


def repeated(batch: Batch, configuration: Configuration) -> Batch:
    """The samples repeated until they fill the global batch: mean loss and gradient stay the same."""
    times = configuration.global_batch_size // N_SAMPLES
    return {key: value.repeat(times, 1) for key, value in batch.items()}
