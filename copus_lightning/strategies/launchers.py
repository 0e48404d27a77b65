"""How the ranks of a script are started."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from copus_lightning.strategies.lightning_module import refuse_unsupported
from copus_lightning.strategies.trainer_checkpoints import TrainerCheckpoints, check_can_resume


class CheckingLauncher(_SubprocessScriptLauncher):
    """Refuses what is not supported before any process is launched."""

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        if trainer is not None and trainer.lightning_module is not None:
            refuse_unsupported(trainer, trainer.lightning_module)
            # Of Trainer.fit, whose arguments these are.
            arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
            check_can_resume(arguments.get("ckpt_path"))
            if isinstance(trainer.strategy, TrainerCheckpoints):
                trainer.strategy.weights_only = arguments.get("weights_only")
        return super().launch(function, *args, trainer=trainer, **kwargs)
