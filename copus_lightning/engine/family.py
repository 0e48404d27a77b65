"""Whether a model in stages and in shards computes what it computes as a whole, tried on a shrunken copy.

Plans name the parts of a model, but not what its forward pass does between them: some families scale the embeddings
wherever the layers are entered, some scale or cap the logits, some take the number of heads from the config and not
from the matrix. They would be trained as other models, and nothing would fail. So a small model of the same class
and config runs once as a whole, once in stages and once with its matrices cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from copus_lightning.core.layout import Layout
from copus_lightning.engine.model import COLUMN, ROW, SUMMED, ModelDescription

N_LAYERS, HEAD_SIZE, INTERMEDIATE_SIZE, VOCABULARY_SIZE = 3, 8, 24, 32
N_SAMPLES, N_TOKENS = 2, 12
N_SHARDS = 2
TOLERANCE = 1e-4
"""Relative to the largest logit; rounding alone stays a hundred times below."""


def check_family(model: Any) -> str | None:
    """Refuses a model that would not stay itself in stages or in shards. Takes a moment; no collective call.

    Args:
        model: A ``PreTrainedModel`` that :class:`ModelDescription` takes. It is left as it is.

    Returns:
        One line that says why no small copy of it could be tried, or None.

    Raises:
        ValueError: Logits, gradients or loss differ, or it is random in training; one line.
    """
    try:
        key = type(model), model.config.to_json_string(use_diff=False)
    except Exception:  # not every config can be written
        return _try(model)
    if key not in _found:
        _found[key] = _try(model)
    return _found[key]


_found: dict[tuple[type, str], str | None] = {}
"""By class and config: several engines of a process may have the same model."""


def _try(model: Any) -> str | None:
    # Whatever the script has set is not to be seen by the small copy.
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            small = shrunken(model)
            ids = torch.arange(N_SAMPLES * N_TOKENS).view(N_SAMPLES, N_TOKENS) * 7 % VOCABULARY_SIZE
            whole = small(input_ids=ids, labels=ids, use_cache=False)
            in_training = _in_training(small, ids)
            description = ModelDescription(small)
        except Exception as error:
            return (
                f"{type(model).__name__} could not be tried in stages and shards on a small copy ({_one_line(error)}): "
                "compare its first losses with those of a run without CopusStrategy"
            )
        _check_dropout(description, in_training, whole.logits)
        loss = _next_token_loss(whole.logits, ids)
        if whole.loss is not None and not abs(loss - whole.loss) <= TOLERANCE * abs(loss):
            raise ValueError(
                f"the loss of {description.config.model_type} is not the mean cross entropy of the next token "
                f"({whole.loss:.4f} and not {loss:.4f}): CopusStrategy cannot train it"
            )
        for n in (1, description.n_layers):
            how = f"in {n} stage{'s' * (n > 1)}"
            _compare(description, how, partial(_in_stages, description, ids, n), whole.logits)
        loss.backward()
        _compare(description, f"in {N_SHARDS} shards", partial(_in_shards, description, ids), whole.logits)
        how = f"with its vocabulary in {N_SHARDS} shards"
        _compare(description, how, partial(_in_vocabulary_shards, description, ids), whole.logits)
    return None


@torch.no_grad()
def _in_training(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        logits: torch.Tensor = model.train()(input_ids=ids, use_cache=False).logits
    model.eval()
    return logits


def _check_dropout(description: ModelDescription, in_training: torch.Tensor, logits: torch.Tensor) -> None:
    """Dropout is often a function of the forward pass, and no module that could be seen."""
    config = description.config
    if not torch.equal(in_training, logits):
        rates = {k: v for k, v in vars(config).items() if ("drop" in k or "jitter" in k) and v}
        raise ValueError(
            f"{config.model_type} is random in training ({_listed(rates)}): ranks that hold the same activations would "
            "drop different ones of them after a change of layout; set it to 0 in the model's config"
        )


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in fields.items()) or "by dropout or noise"


def _next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _compare(
    description: ModelDescription, how: str, run: Callable[[], torch.Tensor], logits: torch.Tensor
) -> None:
    try:
        apart = ((run() - logits).abs().max() / logits.abs().max()).item()
    except _Untrue as error:
        found = f"gives {error} another gradient"
    except Exception as error:
        found = f"fails ({_one_line(error)})"
    else:
        if apart <= TOLERANCE:
            return
        found = f"gives logits that are {apart:.2%} apart"
    raise ValueError(
        f"{description.config.model_type} {how} {found}: its forward pass does more than its pipeline and tensor plans "
        "say, and CopusStrategy cannot train it"
    )


@torch.no_grad()
def _in_stages(description: ModelDescription, ids: torch.Tensor, n_stages: int) -> torch.Tensor:
    """Logits of all stages, one after the other."""
    groups: Any = SimpleNamespace(layout=Layout(pipeline=n_stages))
    state_map = description.state_map(0, {tensor.name: 0 for tensor in description.tensors})
    outputs = ids
    for rank in range(n_stages):
        outputs = description.build_stage(state_map, groups, rank)(outputs)
    return outputs


class _Untrue(Exception):
    """Names a parameter that all shards have, and whose gradient would not be the whole model's."""


class _Summed(nn.Module):
    """A part of a model of which each shard gives a share of the output."""

    def __init__(self, shards: list[nn.Module]) -> None:
        super().__init__()
        self.shards = nn.ModuleList(shards)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = [shard(*args, **kwargs) for shard in self.shards]
        if not isinstance(outputs[0], tuple):
            return sum(outputs)
        return (sum(output[0] for output in outputs), *outputs[0][1:])


def _in_shards(description: ModelDescription, ids: torch.Tensor) -> torch.Tensor:
    """Logits with the matrices of the layers cut; embedding and head are whole.

    Raises:
        _Untrue: A parameter that all shards have would get another gradient.
    """
    model = copy.deepcopy(description.skeleton)
    leaves: dict[str, list[str]] = {}
    for name, style in description.styles.items():
        if style in (COLUMN, ROW):
            part, _, leaf = name.rpartition(".")
            leaves.setdefault(part, []).append(leaf)
    gradients = {name: parameter.grad for name, parameter in description.skeleton.named_parameters()}
    replicas: list[tuple[str, list[nn.Parameter]]] = []
    for part, cut in leaves.items():
        parent, _, leaf = part.rpartition(".")
        shards = [
            _shard(description, model.get_submodule(part), part, cut, index) for index in range(N_SHARDS)
        ]
        setattr(model.get_submodule(parent), leaf, _Summed(shards))
        for name, parameter in shards[0].named_parameters(prefix=part):
            rule = description.styles.get(name.rpartition(".")[0])
            if rule is None:  # every rank's gradient has to be the whole one
                replicas.append((name, [parameter]))
            elif rule == SUMMED:
                within = name.removeprefix(f"{part}.")
                replicas.append((name, [shard.get_parameter(within) for shard in shards]))
    known = {name for name, _ in replicas}
    for name, _ in description.skeleton.named_parameters():
        if description.styles.get(name.rpartition(".")[0]) == SUMMED and name not in known:
            raise _Untrue(name)  # it works on whole activations: its gradient would be summed once too often
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    _next_token_loss(logits, ids).backward()
    largest = max(gradient.norm() for gradient in gradients.values() if gradient is not None)
    for name, parameters in replicas:
        expected = gradients[name]
        if expected is not None:
            found = sum((p.grad for p in parameters if p.grad is not None), torch.zeros_like(expected))
            if (found - expected).norm() > TOLERANCE * max(expected.norm(), 1e-2 * largest):
                raise _Untrue(name)
    return logits.detach()


@torch.no_grad()
def _in_vocabulary_shards(description: ModelDescription, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model with the first part of the head, beside those with the next; the embedding is looked up so."""
    embedding = description.skeleton.get_input_embeddings()
    looked_up = F.embedding(ids, embedding.weight) * getattr(embedding, "embed_scale", 1.0)
    if not torch.allclose(looked_up, embedding(ids), rtol=TOLERANCE):
        raise ValueError(f"{type(embedding).__name__} does more than to look up and to scale")
    parts = []
    for index in range(N_SHARDS):
        model = copy.deepcopy(description.skeleton)
        head = model.get_submodule(description.head_name)
        for name, parameter in list(head.named_parameters()):
            setattr(head, name, nn.Parameter(parameter.chunk(N_SHARDS)[index]))
        parts.append(model(input_ids=ids, use_cache=False).logits)
    return torch.cat(parts, dim=-1)


def _shard(
    description: ModelDescription, part: nn.Module, name: str, leaves: list[str], index: int
) -> nn.Module:
    shard = copy.deepcopy(part)
    for leaf in leaves:
        module: Any = shard.get_submodule(leaf)
        by_rows = description.styles[f"{name}.{leaf}"] == ROW
        module.weight = nn.Parameter(module.weight.detach().chunk(N_SHARDS, dim=int(by_rows))[index])
        if module.bias is not None and (not by_rows or index > 0):
            bias = torch.zeros_like(module.bias) if by_rows else module.bias.detach().chunk(N_SHARDS)[index]
            module.bias = nn.Parameter(bias)
    return shard


def shrunken(model: Any) -> Any:
    """A small model of the same class and config, with weights at which scales and caps are felt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(model)(_small_config(model.config)).float().eval()
        for parameter in small.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 1.0, 0.1)
            else:
                nn.init.normal_(parameter, 0.0, 2.0 * parameter.shape[-1] ** -0.5)
    return small


def _small_config(config: Any) -> Any:
    small = copy.deepcopy(config)
    n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
    grouped = getattr(config, "num_key_value_heads", None) not in (None, n_heads)
    n_small = min(n_layers, N_LAYERS)
    for name, value in vars(config).items():  # what is listed per layer, such as kinds of attention
        if isinstance(value, list) and len(value) == n_layers:
            setattr(small, name, value[:n_small])
        elif name.endswith("token_id") and value is not None:
            setattr(small, name, [0] if isinstance(value, list) else 0)
        elif name == "rotary_dim" and value is not None:
            small.rotary_dim = min(value, HEAD_SIZE)
    small.num_hidden_layers, small.num_attention_heads = n_small, 4
    if getattr(config, "num_key_value_heads", None) is not None:
        small.num_key_value_heads = 2 if grouped else 4
    if getattr(config, "head_dim", None) is not None and not hasattr(config, "qk_rope_head_dim"):
        small.head_dim = HEAD_SIZE
    small.hidden_size, small.intermediate_size = 4 * HEAD_SIZE, INTERMEDIATE_SIZE
    small.vocab_size = VOCABULARY_SIZE
    small._attn_implementation = "eager"
    return small


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
