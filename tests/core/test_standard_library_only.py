"""Core is numbers: it must be importable, and tested, where nothing else is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import copus_lightning.core

PROGRAM = """
import importlib, pkgutil, sys
before = set(sys.modules)
import copus_lightning.core as core
for module in pkgutil.iter_modules(core.__path__):
    importlib.import_module(f"{core.__name__}.{module.name}")
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(roots - set(sys.stdlib_module_names) - {"copus_lightning"}))
"""


def test_core_imports_the_standard_library_alone() -> None:
    root = Path(copus_lightning.core.__path__[0]).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == []
