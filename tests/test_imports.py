"""What importing the package loads, and that its strategy's name is known in either order of imports."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import commands
import pytest

import copus_lightning
from copus_lightning import _registration

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    """Standard output of `code` in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = {"torch", "lightning", "deepspeed", "transformers", "torchmetrics"}


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("import copus_lightning", {*HEAVY, "numpy", "omegaconf", "matplotlib"}),
        ("import copus_lightning.core", {*HEAVY, "numpy", "omegaconf", "matplotlib"}),
        (
            "import pkgutil, importlib, copus_lightning.core as core\n"
            "for module in pkgutil.iter_modules(core.__path__, 'copus_lightning.core.'):\n"
            "    importlib.import_module(module.name)",
            {*HEAVY, "numpy", "omegaconf", "matplotlib"},
        ),
        ("import copus_lightning.config", HEAVY),
        ("import copus_lightning.plots", {*HEAVY, "omegaconf"}),
        ("from copus_lightning import Configuration, Layout, Profile", {*HEAVY, "numpy"}),
    ],
)
def test_what_an_import_does_not_load(imports: str, absent: set[str]) -> None:
    loaded = json.loads(run_python(f"{imports}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"))
    assert not absent & set(loaded)


def test_the_contracts_between_the_parts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_public_names_are_listed_and_others_refused() -> None:
    assert set(copus_lightning.__all__) <= set(dir(copus_lightning))
    with pytest.raises(AttributeError, match="has no attribute 'CopusStrategie'"):
        copus_lightning.CopusStrategie  # noqa: B018


def test_every_public_name_is_there() -> None:
    for name in copus_lightning.__all__:
        assert getattr(copus_lightning, name) is not None


def uses(imports: str, registry: str, tmp_path: Path) -> None:
    """Asks Lightning for the strategy by name after some imports, and looks for traces of the wait."""
    factory = registry.split(".")[1]
    make, home, name = {
        "fabric": ("Fabric(accelerator='cpu', devices=1", "fabric", "CopusStrategy"),
        "pytorch": (
            "Trainer(accelerator='cpu', devices=1, barebones=True",
            "trainer",
            "CopusTrainerStrategy",
        ),
    }[factory]
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
assert not {{"copus_lightning", "lightning"}} & sys.modules.keys()
{imports}
from copus_lightning.strategies.{home} import {name}
assert isinstance({make}, strategy="copus").strategy, {name})
import {registry} as strategies
assert type(strategies.__loader__).__name__ == type(strategies.__spec__.loader).__name__ == "SourceFileLoader"
assert "{registry}" not in [getattr(finder, "name", None) for finder in sys.meta_path]
""")
    done = commands.run(program, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import copus_lightning\nfrom lightning.fabric import Fabric",
        "from lightning.fabric import Fabric\nimport copus_lightning",
    ],
    ids=["package first", "Lightning first"],
)
def test_the_name_of_the_fabric_strategy_works_in_either_order(imports: str, tmp_path: Path) -> None:
    uses(imports, "lightning.fabric.strategies", tmp_path)


@pytest.mark.parametrize(
    "imports",
    [
        "import copus_lightning\nfrom lightning import Trainer",
        "from lightning.pytorch import Trainer\nimport copus_lightning",
    ],
    ids=["package first", "Lightning first"],
)
def test_the_name_of_the_trainer_strategy_works_in_either_order(imports: str, tmp_path: Path) -> None:
    uses(imports, "lightning.pytorch.strategies", tmp_path)


def test_a_waiting_registration_fires_once_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, make, description, override):\n"
        "        self[name] = make\n"
        "REGISTRY = Registry()\n"
    )
    home = types.ModuleType("late_home")
    home.Strategy = lambda **arguments: ("made", arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_home", home)
    monkeypatch.syspath_prepend(str(tmp_path))
    registrations = {"late_module": _registration.Registration("REGISTRY", "late_home", "Strategy")}
    monkeypatch.setattr(_registration, "REGISTRATIONS", registrations)
    finders = list(sys.meta_path)
    _registration.register_strategies()
    assert len(sys.meta_path) == len(finders) + 1
    import late_module  # type: ignore[import-not-found]

    assert sys.meta_path == finders
    assert late_module.REGISTRY["copus"](layout="dp2-tp1-pp1") == ("made", {"layout": "dp2-tp1-pp1"})
    assert Path(late_module.__spec__.loader.get_filename()) == tmp_path / "late_module.py"
    monkeypatch.delitem(sys.modules, "late_module")


def test_a_waiting_registration_passes_on_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = _registration._Finder("no_such_module_anywhere")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_module_anywhere")
    assert finder in sys.meta_path
