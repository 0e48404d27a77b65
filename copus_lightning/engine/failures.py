"""What can go wrong on one rank, told apart, and the errors that all ranks then raise together."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

MEMORY, CONNECTION, OTHER = "memory", "connection", "error"

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
_CONNECTION_WORDS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
    "timed out",
    "timeout",
    "socket",
    "gloo",
    "nccl",
)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """One rank's part in a failure.

    Attributes:
        kind: ``memory``; ``connection`` (the rank only noticed that another one failed); ``error``.
        reason: One line.
    """

    rank: int
    kind: str
    reason: str


def describe(error: BaseException, rank: int) -> Failure:
    """One line and the kind of an error, whose tracebacks are forgotten."""
    forget_tracebacks(error)
    return classify(error, rank)


def log_traceback(error: BaseException, rank: int) -> None:
    """Logs where an error comes from, unless all is said with memory or a connection: it is about to be forgotten."""
    if classify(error, rank).kind == OTHER:
        # As text: a log record that is kept would hold on to what the frames hold.
        _log.error("rank %d failed:\n%s", rank, "".join(traceback.format_exception(error)).rstrip())


def forget_tracebacks(error: BaseException) -> None:
    """Drops what would hold on to process groups, whose connections then stay open."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def classify(error: BaseException, rank: int) -> Failure:
    """One line and the kind of an error, which stays as it is."""
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = text.lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(w in lowered for w in _MEMORY_WORDS):
        kind = MEMORY
    elif isinstance(error, (dist.DistError, ConnectionError, RuntimeError)) and any(
        w in lowered for w in _CONNECTION_WORDS
    ):
        kind = CONNECTION
    else:
        kind = OTHER
        text = f"{type(error).__name__}: {text}"
    return Failure(rank, kind, text[:300])


def causes(failures: list[Failure]) -> list[Failure]:
    """Those that did not merely notice that another rank failed; all of them if none did."""
    return [f for f in failures if f.kind != CONNECTION] or failures


class CollectiveError(RuntimeError):
    """An error that every rank raises together. ``reason`` is one line that names the rank and what happened."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OutOfMemory(CollectiveError):
    """A step ran out of memory on some rank. The engine has recovered: weights and state are as before it."""


class SwitchFailed(CollectiveError):
    """A switch failed on some rank. All ranks are back in the old configuration, with bit-identical state."""


class StepFailed(CollectiveError):
    """A step failed on some rank for another reason than memory. The engine is closed."""


class RankLost(CollectiveError):
    """A rank does not answer any more. The run cannot go on."""
