"""Adaptive batch size and 3D parallelism for language-model training with Lightning and Fabric.

The public names load on first use, so that `copus_lightning.core`, `config` and `plots` work without torch.
Importing the package makes `Fabric(strategy="copus")` and `Trainer(strategy="copus")` work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from copus_lightning._registration import register_strategies

if TYPE_CHECKING:
    from copus_lightning.callbacks import CopusCallback
    from copus_lightning.config import Config, load
    from copus_lightning.core.layout import Configuration, Layout
    from copus_lightning.core.profile import Profile
    from copus_lightning.strategies.fabric import CopusStrategy
    from copus_lightning.strategies.trainer import CopusTrainerStrategy

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Configuration",
    "CopusCallback",
    "CopusStrategy",
    "CopusTrainerStrategy",
    "Layout",
    "Profile",
    "__version__",
    "load",
]

_HOMES = {
    "Config": "copus_lightning.config",
    "Configuration": "copus_lightning.core.layout",
    "CopusCallback": "copus_lightning.callbacks",
    "CopusStrategy": "copus_lightning.strategies.fabric",
    "CopusTrainerStrategy": "copus_lightning.strategies.trainer",
    "Layout": "copus_lightning.core.layout",
    "Profile": "copus_lightning.core.profile",
    "load": "copus_lightning.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


register_strategies()
