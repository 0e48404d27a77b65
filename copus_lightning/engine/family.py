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
from copus_lightning.engine.model import COLUMN, ROW, ModelDescription

N_LAYERS, HEAD_SIZE, INTERMEDIATE_SIZE, VOCABULARY_SIZE = 3, 8, 24, 32
N_SAMPLES, N_TOKENS = 2, 12
N_SHARDS = 2
TOLERANCE = 1e-4
"""Relative to the largest logit; rounding alone stays a hundred times below."""


def check_family(model: Any) -> str | None:
    """Refuses a model that would not stay itself in stages or in shards. Takes some 0.05 s; no collective call.

    Args:
        model: A ``PreTrainedModel`` that :class:`ModelDescription` takes. It is left as it is.

    Returns:
        One line that says why no small copy of it could be tried, or None.

    Raises:
        ValueError: Logits or loss differ; one line.
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _passed:
        _passed[key] = _try(model)
    return _passed[key]


_passed: dict[tuple[type, str], str | None] = {}
"""Classes and configs that were tried in this process, in which several engines may have the same model."""


def _try(model: Any) -> str | None:
    try:
        small = shrunken(model)
        ids = torch.arange(N_SAMPLES * N_TOKENS).view(N_SAMPLES, N_TOKENS) * 7 % VOCABULARY_SIZE
        whole = small(input_ids=ids, labels=ids, use_cache=False)
        description = ModelDescription(small)
    except Exception as error:
        return (
            f"{type(model).__name__} could not be tried in stages and shards on a small copy ({_one_line(error)}): "
            "compare its first losses with those of a run without CopusStrategy"
        )
    _check_dropout(description, ids, whole.logits)
    loss = _next_token_loss(whole.logits, ids)
    if not abs(loss - whole.loss) <= TOLERANCE * abs(loss):
        raise ValueError(
            f"the loss of {description.config.model_type} is not the mean cross entropy of the next token "
            f"({whole.loss:.4f} and not {loss:.4f}): CopusStrategy cannot train it"
        )
    for n in (1, description.n_layers):
        how = f"in {n} stage{'s' * (n > 1)}"
        _compare(description, how, partial(_in_stages, description, ids, n), whole.logits)
    loss.backward()
    _compare(description, f"in {N_SHARDS} shards", partial(_in_shards, description, ids), whole.logits)
    return None


@torch.no_grad()
def _check_dropout(description: ModelDescription, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Dropout is often a function of the forward pass, and no module that could be seen."""
    model = description.skeleton
    with torch.random.fork_rng(devices=[]):
        in_training = model.train()(input_ids=ids, use_cache=False).logits
    model.eval()
    if not torch.equal(in_training, logits):
        rates = {k: v for k, v in vars(model.config).items() if ("drop" in k or "jitter" in k) and v}
        raise ValueError(
            f"{model.config.model_type} is random in training ({_listed(rates)}): ranks that hold the same activations "
            "would drop different ones of them after a change of layout; set it to 0 in the model's config"
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
    except _Partial as error:
        found = f"gives {error} a part of its gradient alone"
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


class _Partial(Exception):
    """A parameter that all shards have, and whose gradient in one of them is not the whole one."""


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
        _Partial: What all shards have would be trained apart.
    """
    model = copy.deepcopy(description.skeleton)
    leaves: dict[str, list[str]] = {}
    for name, style in description.styles.items():
        if style in (COLUMN, ROW):
            part, _, leaf = name.rpartition(".")
            leaves.setdefault(part, []).append(leaf)
    gradients = {name: parameter.grad for name, parameter in description.skeleton.named_parameters()}
    replicas: list[tuple[str, nn.Parameter]] = []
    for part, cut in leaves.items():
        parent, _, leaf = part.rpartition(".")
        whole = model.get_submodule(part)
        shards = [_shard(description, whole, part, cut, index) for index in range(N_SHARDS)]
        setattr(model.get_submodule(parent), leaf, _Summed(shards))
        for name, parameter in shards[0].named_parameters(prefix=part):
            if name.rpartition(".")[0] not in description.styles:
                replicas.append((name, parameter))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    _next_token_loss(logits, ids).backward()
    least = max(gradient.norm() for gradient in gradients.values() if gradient is not None)
    for name, parameter in replicas:
        expected, found = gradients[name], parameter.grad
        if expected is not None and (found is None or (found - expected).norm() > TOLERANCE * least):
            raise _Partial(name)
    return logits.detach()


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
    """A small model of the same class and config on the CPU, with weights at which scales and caps are felt."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
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
