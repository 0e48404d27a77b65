"""Every override can be called the way Lightning calls what it overrides."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from copus_lightning import CopusCallback, CopusStrategy, CopusTrainerStrategy
from copus_lightning.strategies.trainer import EnginePrecision
from copus_lightning.strategies.trainer_launcher import CheckingLauncher

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
CLASSES = (CopusStrategy, CopusTrainerStrategy, EnginePrecision, CopusCallback, CheckingLauncher)


def is_ours(cls: type) -> bool:
    return cls.__module__.startswith("copus_lightning")


def lightnings_base(cls: type) -> type:
    """What Lightning thinks it has in hand."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("lightning"))


def overrides(cls: type) -> Iterator[str]:
    base = lightnings_base(cls)
    for name in dir(base):
        owner = next(c for c in cls.__mro__ if name in vars(c))
        dunder = name.startswith("__") and (name != "__init__" or getattr(base, name) is object.__init__)
        if is_ours(owner) and not dunder:
            yield name


def differences(override: Any, base: Any, ordered: bool = True) -> list[str]:
    """How the override's parameters do not accept all that the base's accept."""
    have, want = inspect.signature(override).parameters, inspect.signature(base).parameters
    kinds = {p.kind for p in have.values()}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    found = []
    for name, parameter in want.items():
        if name not in have:
            if not takes_all:
                found.append(f"misses {name}")
        elif have[name].kind != parameter.kind:
            found.append(f"{name} is {have[name].kind.description}, not {parameter.kind.description}")
        elif parameter.default is not parameter.empty and have[name].default is parameter.empty:
            found.append(f"{name} has no default")
    for name, parameter in have.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            *POSITIONAL,
            inspect.Parameter.KEYWORD_ONLY,
        )
        if name not in want and required:
            found.append(f"requires {name}")
    if ordered and not takes_all:
        in_order = [n for n, p in have.items() if p.kind in POSITIONAL and n in want]
        if in_order != [n for n, p in want.items() if p.kind in POSITIONAL and n in have]:
            found.append("has its positional parameters in another order")
    return found


@pytest.mark.parametrize("cls", CLASSES)
def test_overrides_accept_what_lightning_passes(cls: type) -> None:
    base = lightnings_base(cls)
    found = {}
    names = list(overrides(cls))
    for name in names:
        ours, theirs = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
        if isinstance(theirs, property):
            if not isinstance(ours, property):
                found[name] = ["is a property in the base"]
            elif theirs.fset is not None and ours.fset is None:
                found[name] = ["can be set in the base"]
        elif callable(theirs) and (problem := differences(ours, theirs, name != "__init__")):
            found[name] = problem
    assert not found
    assert len(names) >= 2, "there is something to compare"


@pytest.mark.parametrize("cls", [CopusStrategy, CopusTrainerStrategy])
def test_nothing_abstract_is_left(cls: type) -> None:
    assert not inspect.isabstract(cls)


def test_both_strategies_take_the_same_options() -> None:
    fabric, trainer = (inspect.signature(c).parameters for c in (CopusStrategy, CopusTrainerStrategy))
    names = list(fabric)
    ours = names[: names.index("accelerator")]
    assert list(trainer)[: len(ours)] == ours
    for name in ours:
        assert fabric[name].default == trainer[name].default, name


def test_fabric_calls_the_callback_by_these_names() -> None:
    """Fabric passes them by keyword, and calls no hook that it does not find."""
    assert list(inspect.signature(CopusCallback.on_after_setup).parameters) == ["self", "fabric", "module"]
    hook = inspect.signature(CopusCallback.on_after_optimizer_step)
    assert list(hook.parameters) == ["self", "strategy", "optimizer"]


def test_the_comparison_sees_what_it_should() -> None:
    def base(self: Any, a: int, *, b: int = 0) -> None: ...

    def missing(self: Any, a: int) -> None: ...

    def demanding(self: Any, a: int, c: int, *, b: int = 0) -> None: ...

    def generous(*args: Any, **kwargs: Any) -> None: ...

    assert differences(missing, base) == ["misses b"]
    assert differences(demanding, base) == ["requires c"]
    assert differences(generous, base) == []
    assert differences(base, base) == []
