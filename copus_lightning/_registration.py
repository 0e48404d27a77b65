"""The strategy name "copus", known to Lightning once this package is imported, in either order of imports.

Lightning finds a strategy's name in a registry that exists only after its own import, and no entry point
leads there. Importing Lightning here would load torch for everyone who wants `copus_lightning.core` alone. So
where Lightning is already imported its registries are filled at once, and where it is not, a finder waits for
the one import that makes a registry, fills it, and leaves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class Registration(NamedTuple):
    """Which registry of which module gets which class."""

    registry: str
    home: str
    strategy: str


REGISTRATIONS = {
    "lightning.fabric.strategies": Registration(
        "STRATEGY_REGISTRY", "copus_lightning.strategies.fabric", "CopusStrategy"
    ),
    "lightning.pytorch.strategies": Registration(
        "StrategyRegistry", "copus_lightning.strategies.trainer", "CopusTrainerStrategy"
    ),
}


def register_strategies() -> None:
    """Registers "copus" now where Lightning is imported, else as soon as it is."""
    for name in REGISTRATIONS:
        if name in sys.modules:
            _register(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name))


def _register(module: ModuleType) -> None:
    registry, home, strategy = REGISTRATIONS[module.__name__]

    def create(**arguments: Any) -> Any:
        # DeepSpeed and the engine load when the strategy is wanted, not when its name is registered.
        return getattr(importlib.import_module(home), strategy)(**arguments)

    getattr(module, registry).register("copus", create, description=strategy, override=True)


class _Finder(MetaPathFinder):
    """Waits for the import of one module, which the other finders find."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """Runs a module's own loader, then registers."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps no trace of this loader: tools that ask for its source get its own one.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        sys.meta_path.remove(self.finder)
        self.loader.exec_module(module)
        _register(module)
