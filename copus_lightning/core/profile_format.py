"""The file format of a throughput profile, described in docs/profile.md.

Reading is strict: a profile decides what a run of days does, so a mistyped key or a negative time is refused
in one line that names the file and the key, never guessed around.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copus_lightning.core.layout import Layout

FORMAT = "copus-profile/1"

_PROFILE_KEYS = ("format", "model", "hardware", "world_size", "switch_seconds", "measurements", "infeasible")
_OPTIONAL_KEYS = ("switch_seconds",)
_MEASUREMENT_KEYS = ("layout", "micro_batch_size", "accumulation", "step_seconds", "peak_memory_bytes")
_INFEASIBLE_KEYS = ("layout", "micro_batch_size", "reason")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a profile file.

    Returns:
        The document with every key present, every value of its type, and layouts as `Layout`.

    Raises:
        ValueError: If the file is missing, is not JSON, or breaks the format; one line naming file and key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such profile: measure one with `copus profile`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the profile cannot be read ({error})") from None
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except ValueError as error:  # JSONDecodeError among them
        raise ValueError(f"{path}: not a JSON profile ({error})") from None
    return check(document, str(path))


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a profile file whole or not at all; missing folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, target)


def check(document: Any, source: str) -> dict[str, Any]:
    """Check a parsed document; see `read`. `source` starts every error message."""
    _keys(document, _PROFILE_KEYS, source, "the profile", optional=_OPTIONAL_KEYS)
    if document["format"] != FORMAT:
        raise ValueError(
            f"{source}: format must be {FORMAT!r}, got {document['format']!r}:"
            " measure anew with `copus profile`"
        )
    for key in ("model", "hardware"):
        if not isinstance(document[key], dict):
            raise ValueError(f"{source}: {key} must be an object of named values, got {document[key]!r}")
    world_size = _count(document["world_size"], source, "world_size", least=1)
    switch_seconds = document.get("switch_seconds")
    if switch_seconds is not None:
        _seconds(switch_seconds, source, "switch_seconds")

    measurements, seen = [], set()
    for key, entry in _entries(document, "measurements", source):
        _keys(entry, _MEASUREMENT_KEYS, source, key)
        layout = _layout(entry["layout"], world_size, source, f"{key}.layout")
        micro = _count(entry["micro_batch_size"], source, f"{key}.micro_batch_size", least=1)
        accumulation = _count(entry["accumulation"], source, f"{key}.accumulation", least=1)
        _seconds(entry["step_seconds"], source, f"{key}.step_seconds")
        if entry["peak_memory_bytes"] is not None:
            _count(entry["peak_memory_bytes"], source, f"{key}.peak_memory_bytes", least=0)
        if (layout, micro, accumulation) in seen:
            raise ValueError(
                f"{source}: {key} is a duplicate: {layout}, micro-batch {micro}, accumulation {accumulation}"
                " was measured already: keep one of them"
            )
        seen.add((layout, micro, accumulation))
        measurements.append({**entry, "layout": layout, "step_seconds": float(entry["step_seconds"])})

    infeasible, refused = [], set()
    for key, entry in _entries(document, "infeasible", source):
        _keys(entry, _INFEASIBLE_KEYS, source, key)
        layout = _layout(entry["layout"], world_size, source, f"{key}.layout")
        micro = _count(entry["micro_batch_size"], source, f"{key}.micro_batch_size", least=1)
        if not isinstance(entry["reason"], str):
            raise ValueError(f"{source}: {key}.reason must be text, got {entry['reason']!r}")
        if (layout, micro) in refused:
            raise ValueError(
                f"{source}: {key} is a duplicate: {layout}, micro-batch {micro} is listed already: keep one"
            )
        refused.add((layout, micro))
        infeasible.append({**entry, "layout": layout})
    return {
        **document,
        "switch_seconds": None if switch_seconds is None else float(switch_seconds),
        "measurements": measurements,
        "infeasible": infeasible,
    }


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys without a word.
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a profile can hold")


def _keys(
    found: Any, expected: tuple[str, ...], source: str, where: str, optional: tuple[str, ...] = ()
) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{source}: {where} must be an object with the keys {', '.join(expected)}")
    for key in found:
        if key not in expected:
            raise ValueError(f"{source}: unknown key {key!r} in {where}: expected only {', '.join(expected)}")
    for key in expected:
        if key not in found and key not in optional:
            raise ValueError(f"{source}: {where} lacks the key {key!r}: measure anew with `copus profile`")


def _entries(document: Mapping[str, Any], key: str, source: str) -> list[tuple[str, Any]]:
    if not isinstance(document[key], list):
        raise ValueError(f"{source}: {key} must be a list, got {document[key]!r}")
    return [(f"{key}[{index}]", entry) for index, entry in enumerate(document[key])]


def _count(value: Any, source: str, key: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{source}: {key} must be a whole number of at least {least}, got {value!r}")
    return value


def _seconds(value: Any, source: str, key: str) -> None:
    # A switch or a step that takes no time at all was not measured.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{source}: {key} must be a positive number of seconds, got {value!r}")


def _layout(text: Any, world_size: int, source: str, key: str) -> Layout:
    try:
        layout = Layout.parse(text)
        layout.check(world_size=world_size)
    except ValueError as error:
        raise ValueError(f"{source}: {key}: {error}") from None
    return layout
