"""What a LightningModule and its Trainer must be like for :class:`CopusTrainerStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

NO_FULL_CHECKPOINTS = (
    "CopusTrainerStrategy cannot save the optimizer's state yet: set enable_checkpointing=False, or save "
    "weights with ModelCheckpoint(save_weights_only=True)"
)
NO_CLIPPING_BY_VALUE = 'gradient_clip_algorithm="value" is not supported: use "norm"'


class CheckingLauncher(_SubprocessScriptLauncher):
    """Refuses what is not supported before any process is launched."""

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        if trainer is not None and trainer.lightning_module is not None:
            refuse_unsupported(trainer, trainer.lightning_module)
        return super().launch(function, *args, trainer=trainer, **kwargs)


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
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only:
            raise ValueError(NO_FULL_CHECKPOINTS)


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
        self._own: dict[str, str] = {}
        self._buffers: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            for prefix in names:
                if id(value) in first:
                    self._own[f"{prefix}.{name}"] = first[id(value)]
                else:
                    self._buffers[f"{prefix}.{name}"] = value.clone()

    def state_dict(self, gathered: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights by their own names, to whole weights and buffers by the checkpoint's names."""
        return {**self._buffers, **{name: gathered[own] for name, own in self._own.items()}}
