"""`copus config`: a configuration as commented YAML."""

from __future__ import annotations

from argparse import Namespace

from copus_lightning.config import load, render


def prepare(arguments: Namespace) -> str:
    """The YAML to print.

    Raises:
        ValueError: A key, a value or the file is wrong.
    """
    return render(load(arguments.config, arguments.overrides))


def run(text: str) -> int:
    """Prints it."""
    print(text, end="")
    return 0
