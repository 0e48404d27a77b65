"""Trainer's launcher: checks before anything is started, and watches what was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from copus_lightning.strategies.launchers import Watching
from copus_lightning.strategies.lightning_module import refuse_unsupported
from copus_lightning.strategies.trainer_checkpoints import TrainerCheckpoints, check_can_resume


class CheckingLauncher(Watching, _SubprocessScriptLauncher):
    """Refuses what is not supported before any process is launched; a rank that is lost later is named."""

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        if trainer is None or not isinstance(trainer.strategy, TrainerCheckpoints):
            return super().launch(function, *args, trainer=trainer, **kwargs)
        if trainer.lightning_module is not None:
            refuse_unsupported(trainer, trainer.lightning_module)
        # Of Trainer.fit, whose arguments these are.
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        check_can_resume(arguments.get("ckpt_path"))
        strategy = trainer.strategy
        strategy.weights_only = arguments.get("weights_only")

        def run(*args: Any, **kwargs: Any) -> Any:
            with strategy.naming_lost_rank():
                return function(*args, **kwargs)

        return super().launch(run, *args, trainer=trainer, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        for child in self.watch.children if self.watch is not None else []:
            child.send_signal(signum)
