"""`copus export`: a checkpoint as a Hugging Face folder that `from_pretrained` loads."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(command: ArgumentParser) -> None:
    """The command's own arguments."""
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder that a run has written")
    command.add_argument("folder", metavar="OUT", help="where to write; it must not exist yet, or be empty")
    command.add_argument(
        "--dtype",
        metavar="TYPE",
        default="float32",
        help="of the weights: float32 (as the run keeps them), bfloat16 or float16",
    )


def prepare(arguments: Namespace) -> Namespace:
    """Checks the checkpoint and the place to write to.

    Raises:
        ValueError: One line that says what is wrong.
    """
    from copus_lightning.engine.export import check_export

    check_export(arguments.checkpoint, arguments.folder, arguments.dtype)
    return arguments


def run(ready: Namespace) -> int:
    """Writes the folder, and says what is in it."""
    import sys

    from copus_lightning.engine.export import export

    try:
        written = export(ready.checkpoint, ready.folder, ready.dtype)
    except ValueError as error:  # a file of the checkpoint is missing or damaged
        print(f"copus: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(f"{path.stat().st_size:>14,} bytes  {path}")
    return 0
