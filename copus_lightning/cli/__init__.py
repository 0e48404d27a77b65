"""The command line: `copus fit | profile | export | config`.

Each command first *prepares*: it reads and checks everything that it was given, and refuses it with one line
on standard error and exit status 2. Only then does it *run*, which launches processes. Nothing heavy is
imported before a command needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["main"]

_COMMANDS = {
    "fit": "train a model, letting its batch and layout follow what is measured",
    "profile": "measure throughput and memory of every layout, micro-batch and accumulation",
    "export": "turn a checkpoint into a Hugging Face folder",
    "config": "print the commented default configuration, or a file with overrides applied",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    `fit` and `profile` start the other ranks of this machine by running the same command line once more, so
    with more than one rank they only work as the process's own command (`copus ...` or
    `python -m copus_lightning.cli ...`).

    Args:
        argv: Arguments after the program's name; those of the process if None.

    Returns:
        Exit status: 0, 1 after a failure that all ranks agreed on, 2 for input that was refused before anything
        was launched, 130 after an interrupt.
    """
    try:
        arguments = _parse(sys.argv[1:] if argv is None else list(argv))
        command: Any = importlib.import_module(f"copus_lightning.cli.{arguments.command}")
        ready = command.prepare(arguments)
    except ValueError as error:
        if _speaks():
            print(f"copus: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            time.sleep(2)  # the launcher ends all ranks once one leaves: the first has to have spoken
        return 2
    try:
        return command.run(ready)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        from copus_lightning.cli.launch import is_first_rank
        from copus_lightning.engine.failures import CollectiveError

        if not isinstance(error, CollectiveError):
            raise
        # One rank speaks for all: the first, or each of the others if the first is lost.
        if is_first_rank() or error.reason.startswith(("rank 0 stopped", "ranks 0,")):
            print(f"copus: {error.reason}", file=sys.stderr)
        return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="copus", description="Training whose batch size and 3D-parallel layout adapt.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name == "export":
            importlib.import_module("copus_lightning.cli.export").add_arguments(command)
            continue
        command.add_argument("--config", metavar="FILE", required=name != "config", help="YAML file")
        if name == "profile":
            command.add_argument(
                "--output", metavar="FILE", help="where to save; default: copus.profile, else in run.run_dir"
            )
        command.add_argument("overrides", metavar="key=value", nargs="*", help="like data.path=FOLDER")
    arguments, rest = parser.parse_known_args(argv)
    for word in rest:  # overrides that stand before an option
        if word.startswith("-"):
            parser.error(f"unknown option {word}")
    if rest and arguments.command == "export":
        parser.error(f"unexpected word {rest[0]}")
    arguments.overrides = [*getattr(arguments, "overrides", []), *rest]
    return arguments


def _speaks() -> bool:
    """False on ranks that another launcher has started beside a first one: they would repeat its line.

    Ranks that this command has started itself speak: the first rank found nothing to refuse.
    """
    by_another = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_NTASKS" in os.environ
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return not by_another or local_rank == "0"
