"""The user's optimizer as a handle, and its class rebuilt on this rank's shards.

The user's optimizer object stays the truth of every hyperparameter: its param groups are read before each step,
so its schedulers keep working whatever the layout. Its class is instantiated anew on the local shards; weights
and state move between instances when the layout changes. That is possible only if the update of an element
depends on nothing but that element's own gradient and state, which is checked by running the class.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from copus_lightning.engine.state import Piece

MASTER = "master"
"""Key of the fp32 weight among the states of a parameter."""


@dataclass(frozen=True)
class StateSchema:
    """What an optimizer keeps for one parameter.

    Attributes:
        elementwise: Keys of tensors of the parameter's shape, in order.
        scalars: Keys of 0-d tensors and numbers (step counts).
    """

    elementwise: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


def instantiate(handle: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer of the handle's class over other parameters, with the hyperparameters in ``groups``."""
    accepted = inspect.signature(type(handle).__init__).parameters
    defaults = {k: v for k, v in handle.defaults.items() if k in accepted}
    return type(handle)(groups, **defaults)


def probe_schema(handle: Optimizer, group: dict[str, Any], where: str) -> StateSchema:
    """Runs the optimizer's class on a small matrix, whole and in two flat pieces, and compares.

    Raises:
        ValueError: The pieces come out different from the whole, or the state is not elementwise.
    """
    name = type(handle).__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    gradients = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    options = {k: v for k, v in group.items() if k != "params"}
    options["lr"] = 1e-2  # a warm-up may have left it at 0, and then nothing would differ
    options.pop("initial_lr", None)

    def run(parts: list[slice] | None) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        whole = start.clone()
        params = [nn.Parameter(whole)] if parts is None else [nn.Parameter(whole.view(-1)[s]) for s in parts]
        optimizer = instantiate(handle, [{**options, "params": params}])
        for gradient in gradients:
            for p, s in zip(params, parts or [slice(None)], strict=True):
                p.grad = gradient.clone() if parts is None else gradient.reshape(-1)[s].clone()
            optimizer.step()
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        return flat, [dict(optimizer.state[p]) for p in params]

    refusal = (
        f"{where}: {name} cannot be resharded, because its update of one element depends on others; "
        "use an elementwise optimizer such as AdamW, SGD or Lion"
    )
    try:
        (whole, states), (pieces, _) = run(None), run([slice(0, 10), slice(10, 24)])
    except Exception as error:
        raise ValueError(f"{refusal} (running it on a flat piece failed: {error})") from error
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-6):
        raise ValueError(refusal)
    elementwise, scalars = [], []
    for key, value in states[0].items():
        if isinstance(value, torch.Tensor) and value.shape == start.shape:
            elementwise.append(key)
        elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.ndim == 0):
            scalars.append(key)
        elif value is not None:
            raise ValueError(f"{refusal} (its state {key!r} has not the parameter's shape)")
    return StateSchema(tuple(elementwise), tuple(scalars))


class OptimizerHandle:
    """The user's optimizer, read by parameter name.

    Args:
        optimizer: The user's optimizer over the whole model's parameters.
        names: The whole model's parameter names by ``id``; tied parameters once.

    Attributes:
        groups: Index of the param group of each trainable parameter, by name.
        schemas: What is kept for a parameter of each group.

    Raises:
        ValueError: The optimizer holds a parameter that is not the model's, misses one that needs a gradient,
            or cannot be resharded.
    """

    def __init__(self, optimizer: Optimizer, names: dict[int, str], trainable: set[str]) -> None:
        self.optimizer = optimizer
        self.groups: dict[str, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"optimizer.param_groups[{index}] holds a parameter that is not the model's: build the "
                        "optimizer from the parameters of the model that is passed to setup()"
                    )
                if names[id(parameter)] in trainable:
                    self.groups[names[id(parameter)]] = index
        missing = sorted(trainable - set(self.groups))
        if missing:
            raise ValueError(
                f"the optimizer misses {len(missing)} trainable parameters of the model, first {missing[0]!r}: "
                "add them to a param group or set requires_grad=False"
            )
        self.schemas = [
            probe_schema(optimizer, group, f"optimizer.param_groups[{index}]")
            for index, group in enumerate(optimizer.param_groups)
        ]

    def keys(self, group: int) -> tuple[str, ...]:
        """Names of the flat states of a parameter of one param group, the master first."""
        return (MASTER, *self.schemas[group].elementwise)

    def all_keys(self, with_state: bool) -> tuple[str, ...]:
        """The master, and with ``with_state`` every moment that some param group keeps."""
        moments = [key for schema in self.schemas for key in schema.elementwise] if with_state else []
        return tuple(dict.fromkeys((MASTER, *moments)))

    def hyperparameters(self, index: int) -> dict[str, Any]:
        """The present hyperparameters of one of the user's param groups."""
        return {k: v for k, v in self.optimizer.param_groups[index].items() if k != "params"}


class FlatOptimizer(BF16_Optimizer):
    """DeepSpeed's sharded optimizer with fp32 accumulation, for bf16 and for fp32 weights.

    Differences to its base: in fp32 the masters are the weights themselves (a view of the flat weights, no
    second copy); norm and clipping are the engine's, which counts every parameter once; the data-parallel group
    over which masters and moments are cut is an argument (a group of one: ZeRO-0).
    """

    def __init__(self, optimizer: Optimizer, names: dict[nn.Parameter, str], shards: ProcessGroup) -> None:
        with _no_memory_report():
            super().__init__(
                optimizer,
                names,
                bfloat16_config=SimpleNamespace(enabled=True, immediate_grad_update=True),
                dp_process_group=shards,
                grad_acc_dtype=torch.float32,
            )
        for index, group in enumerate(optimizer.param_groups):
            weights = self.bf16_partitioned_groups[index]
            if weights[0].dtype == torch.float32:
                rank = torch.distributed.get_rank(group=self.real_dp_process_group[index])
                self.fp32_groups_flat_partition[index] = weights[rank].detach().requires_grad_()
                group["params"] = [self.fp32_groups_flat_partition[index]]

    def _link_all_hp_params(self) -> None:
        """DeepSpeed's own fragment addresses are not needed, and would keep the first masters alive."""

    def _enable_universal_checkpoint(self) -> None:
        """As above."""

    def _create_param_mapping(self) -> list[Any]:
        return []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for master, gradient in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            master.grad = gradient
        self.optimizer.step()
        self.update_lp_params()
        self.clear_hp_grads()


@contextlib.contextmanager
def _no_memory_report() -> Iterator[None]:
    """DeepSpeed's constructor collects garbage twice per param group to report memory; that costs 0.1 s each."""
    before = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = before


def is_flat(zero_stage: int, dtype: torch.dtype) -> bool:
    """Whether masters and moments lie in flat storages, a param group in each; else they are the parameters' own."""
    return zero_stage == 1 or dtype != torch.float32


@dataclass
class ShardOptimizer:
    """The optimizer of one rank under one layout.

    Attributes:
        parameters: Local parameters by logical name, in the order of the state map.
        user_groups: For each local param group the index of the user's.
        flat: DeepSpeed's sharded optimizer, or None where the torch optimizer acts on the parameters (fp32,
            ZeRO-0).
    """

    handle: OptimizerHandle
    parameters: dict[str, nn.Parameter]
    zero_stage: int
    shards: ProcessGroup
    user_groups: list[int] = field(init=False)
    flat: FlatOptimizer | None = field(init=False)
    torch_optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault(self.handle.groups[name], []).append(parameter)
        self.user_groups = sorted(groups)
        arguments = [{**self._options(i), "params": groups[i]} for i in self.user_groups]
        self.torch_optimizer = instantiate(self.handle.optimizer, arguments)
        self.flat = None
        dtype = next(iter(self.parameters.values())).dtype
        if is_flat(self.zero_stage, dtype):
            names = {p: n for n, p in self.parameters.items()}
            self.flat = FlatOptimizer(self.torch_optimizer, names, self.shards)

    @property
    def engine_optimizer(self) -> Any:
        """What DeepSpeed's engine is given."""
        return self.flat or self.torch_optimizer

    def _options(self, user_group: int) -> dict[str, Any]:
        options = self.handle.hyperparameters(user_group)
        options.pop("initial_lr", None)
        return options

    # -- step --------------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor]:
        """The accumulated fp32 gradient of each local parameter, flattened or not."""
        if self.flat is None:
            return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        by_parameter: dict[int, torch.Tensor] = {}
        for params, grads in zip(self.flat.bf16_groups, self.flat.fp32_groups_gradients, strict=True):
            by_parameter.update({id(p): g for p, g in zip(params, grads, strict=True)})
        return {n: by_parameter[id(p)] for n, p in self.parameters.items()}

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradient that this rank's step uses."""
        if factor == 1.0:
            return
        if self.flat is None:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        else:
            gradients = list(self.flat.fp32_groups_gradient_flat_partition)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self, learning_rate_factor: float = 1.0) -> None:
        """Updates weights with the user's present hyperparameters, the rate times ``learning_rate_factor``."""
        for user_group, group in zip(self.user_groups, self.torch_optimizer.param_groups, strict=True):
            group.update(self._options(user_group))
            group["lr"] = group["lr"] * learning_rate_factor
        if self.flat is not None:
            self.flat.step()
        else:
            self.torch_optimizer.step()
            self.zero_grad()

    def zero_grad(self) -> None:
        """Drops the accumulated gradient."""
        if self.flat is not None:
            self.flat.zero_grad()
        else:
            for parameter in self.parameters.values():
                parameter.grad = None

    # -- state -------------------------------------------------------------------------------------------------

    def storage(self, piece: Piece, name: str, key: str) -> torch.Tensor:
        """The flat fp32 storage of one piece: a view of the live master or moment, made if there is none yet."""
        owner = self._owner(piece, name)
        offset = piece.flat_start if self.flat is None else piece.group_offset
        if key == MASTER:
            whole = owner.detach()
        else:
            state = self.torch_optimizer.state[owner]
            if state.get(key) is None:
                state[key] = torch.zeros_like(owner, memory_format=torch.contiguous_format).detach()
            whole = state[key]
        return whole.view(-1)[offset : offset + piece.numel]

    def _owner(self, piece: Piece, name: str) -> torch.Tensor:
        if self.flat is None:
            return self.parameters[name]
        return self.flat.fp32_groups_flat_partition[self.user_groups.index(piece.group)]

    def scalars(self) -> dict[int, dict[str, Any]]:
        """Step counts and other scalars, one set per user group that has state here."""
        found: dict[int, dict[str, Any]] = {}
        for user_group, group in zip(self.user_groups, self.torch_optimizer.param_groups, strict=True):
            names = self.handle.schemas[user_group].scalars
            for parameter in group["params"]:
                state = self.torch_optimizer.state.get(parameter)
                if state and all(k in state for k in names):
                    values = {k: state[k] for k in names}
                    found[user_group] = {
                        k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v
                        for k, v in values.items()
                    }
        return found

    def load_scalars(self, scalars: dict[int, dict[str, Any]]) -> None:
        """Sets the scalars of every local parameter, on its device where the optimizer wants them there."""
        for user_group, group in zip(self.user_groups, self.torch_optimizer.param_groups, strict=True):
            on_device = group.get("fused") or group.get("capturable")
            for key, value in scalars.get(user_group, {}).items():
                for parameter in group["params"]:
                    copied = value
                    if isinstance(value, torch.Tensor):
                        copied = value.to(parameter.device if on_device else "cpu", copy=True)
                    self.torch_optimizer.state[parameter][key] = copied

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Recasts the weights from the masters, and gathers them over data ranks where masters are cut."""
        if self.flat is not None:
            self.flat.update_lp_params()

    def close(self) -> None:
        """Drops hooks and references."""
        if self.flat is not None:
            self.flat.destroy()
            self.flat.__dict__.clear()  # it refers to itself by the hooks it had
            self.flat = None
        self.torch_optimizer.state.clear()
        self.parameters = {}
