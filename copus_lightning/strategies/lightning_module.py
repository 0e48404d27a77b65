"""What a LightningModule and its Trainer must be like for :class:`CopusTrainerStrategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from transformers import PreTrainedModel

NO_CLIPPING_BY_VALUE = 'gradient_clip_algorithm="value" is not supported: use "norm"'


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses what would be ignored or come out wrong.

    Raises:
        ValueError: One line that names the setting and the fix.
    """
    if trainer.state.fn is not None and trainer.state.fn != TrainerFn.FITTING:
        raise ValueError(
            f"trainer.{trainer.state.fn.value}() is not supported: CopusTrainerStrategy trains, and validates "
            "within fit(); evaluate saved weights with another strategy"
        )
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False is not supported: leave it on and return one optimizer from "
            "configure_optimizers"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not supported: leave it at 1, "
            "CopusTrainerStrategy(global_batch_size=…, micro_batch_size=…) accumulates by itself"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise ValueError(NO_CLIPPING_BY_VALUE)
    if getattr(trainer, "overfit_batches", 0) > 0:
        raise ValueError(
            "overfit_batches is not supported, every sample is used once: pass a smaller dataset"
        )
    if getattr(trainer, "reload_dataloaders_every_n_epochs", 0) > 0:
        raise ValueError(
            "reload_dataloaders_every_n_epochs is not supported: leave it at 0, a new loader would start the "
            "order of samples anew"
        )


def language_model(module: pl.LightningModule) -> tuple[list[str], PreTrainedModel]:
    """The one Hugging Face model among a module's submodules, and the names under which it is there.

    Raises:
        ValueError: There is none, or more than one.
    """
    found: dict[str, PreTrainedModel] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(child, PreTrainedModel) and not inside:
            found[name] = child
    models = {id(model): model for model in found.values()}
    if len(models) != 1:
        raise ValueError(
            f"{type(module).__name__} has {len(models)} Hugging Face models among its submodules "
            f"({', '.join(found) or 'none'}): CopusTrainerStrategy trains exactly one, and once"
        )
    (model,) = models.values()
    return list(found), model


class WholeWeights:
    """Under which names a checkpoint of the LightningModule holds the model's weights; tied ones twice.

    Args:
        names: Under which the model is in the LightningModule.
        model: As it was before it was handed to the engine.
    """

    def __init__(self, names: list[str], model: nn.Module) -> None:
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self.n_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._placeholders: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._own: dict[int, str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            for prefix in names:
                if id(value) in first:
                    placeholder = torch.empty(value.shape, device="meta")
                    self._placeholders[f"{prefix}.{name}"] = placeholder
                    self._own[id(placeholder)] = first[id(value)]
                else:
                    self._buffers[f"{prefix}.{name}"] = value.clone()

    def placeholders(self) -> dict[str, Tensor]:
        """Buffers, and tensors on ``meta`` in place of the weights, by the checkpoint's names."""
        return {**self._buffers, **self._placeholders}

    def filled_in(self, state: Mapping[str, Any], gathered: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state with whole weights where the placeholders are, under whatever name they are there now.

        Raises:
            ValueError: One was replaced by something computed from it.
        """
        filled = {}
        for name, value in state.items():
            own = self._own.get(id(value))
            if own is None and isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"state_dict[{name!r}] was computed in on_save_checkpoint from a weight that is not gathered "
                    "yet: leave weights out or rename them there, change their values after loading"
                )
            filled[name] = value if own is None else gathered[own]
        return filled

    def others(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state without weights and buffers of the model."""
        known = self._own.keys() | {id(buffer) for buffer in self._buffers.values()}
        return {name: value for name, value in state.items() if id(value) not in known}
