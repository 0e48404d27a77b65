"""YAML in, a valid `Config` out; and a `Config` as commented YAML."""

from __future__ import annotations

import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from copus_lightning.config.checks import suggestion
from copus_lightning.config.config import Config
from copus_lightning.config.schema import ConfigError

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
_COMMENT_COLUMN = 42
_WIDTH = 118


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, and validate all of it.

    Interpolations such as `${data.sequence_length}` and `${oc.env:HOME}` are resolved. Numbers may be written
    `1e-3`, `5e8` or `1_000_000`, quoted or not.

    Args:
        path: The file; None takes the defaults.
        overrides: Each `section.key=value`, the value in YAML; later ones win.

    Raises:
        ConfigError: With one line that names the key, or the file and line, and the fix.
    """
    schema = OmegaConf.structured(Config)
    defaults: Any = OmegaConf.to_container(schema)
    known = {*defaults, *(key for key, _ in _entries(defaults))}
    try:
        layers = [_read(path)] if path is not None else []
        layers += [_override(text) for text in overrides]
        plain_layers: list[Any] = [OmegaConf.to_container(layer, resolve=False) for layer in layers]
        for layer in plain_layers:
            _refuse_unknown(layer, known)
        given = {key: value for layer in plain_layers for key, value in _entries(layer)}
        for key, value in given.items():
            if value == "???":
                raise ConfigError(f"{key}: a value is required here: give it as {key}=...")
        # Merged without types first, so that an interpolation may refer to a default, and typed here rather
        # than by OmegaConf, which takes 5e8 for a float and refuses it as a number of tokens.
        merged = OmegaConf.merge(OmegaConf.create(defaults), *layers)
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        config = OmegaConf.to_object(OmegaConf.merge(schema, _typed_sections(plain)))
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(key + str(error).split("\n")[0]) from None
    assert isinstance(config, Config)
    return config


def default_yaml() -> str:
    """The defaults as YAML, with the meaning of each key beside it."""
    return render(Config())


def render(config: Config) -> str:
    """A configuration as commented YAML; `load` reads it back to an equal one."""
    lines = []
    for section in fields(config):
        values = getattr(config, section.name)
        lines += ["", f"# {(values.__doc__ or '').splitlines()[0]}", f"{section.name}:"]
        for entry in fields(values):
            comment = entry.metadata["comment"]
            choices = entry.metadata.get("choices")
            if choices and not all(str(choice) in comment for choice in choices):
                comment += f": {' | '.join(map(str, choices))}"
            head = f"  {entry.name}: {_scalar(getattr(values, entry.name))}"
            # A value that is too wide for its column pushes the comment to lines of its own.
            if len(head) >= _COMMENT_COLUMN:
                lines.append(head)
                head = ""
            wrapped = textwrap.wrap(comment, _WIDTH - _COMMENT_COLUMN - 2)
            lines += [f"{head:<{_COMMENT_COLUMN}}# {wrapped[0]}"]
            lines += [f"{'':<{_COMMENT_COLUMN}}#   {more}" for more in wrapped[1:]]
    return "\n".join(lines[1:]) + "\n"


def _scalar(value: Any) -> str:
    """One value as YAML: plain where that is safe, else JSON, which YAML contains."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:_}"
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z][\w./-]*", value)
        and value.lower() not in _YAML_WORDS
    ):
        return value
    return json.dumps(value)


def _read(path: str | Path) -> DictConfig:
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(
            f"config {path} does not exist: print one to start from with `copus config`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path}{_yaml_problem(error)}") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"config {path} must be sections with keys, like the output of `copus config`")
    sections = OmegaConf.to_container(content, resolve=False)
    assert isinstance(sections, dict)
    # A section whose keys are all commented out reads as null: it keeps its defaults.
    return OmegaConf.create({key: entries for key, entries in sections.items() if entries is not None})


def _override(text: str) -> DictConfig:
    key, equals, _ = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)+", key):
        raise ConfigError(f"override {text!r} is not understood: write it like data.path=FOLDER")
    try:
        return OmegaConf.from_dotlist([text])
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}{_yaml_problem(error)}") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f", line {mark.line + 1}," if mark else ""
    return f"{place} is not valid YAML: {problem or str(error).splitlines()[0]}"


def _entries(sections: Any) -> Iterator[tuple[str, Any]]:
    for section, entries in sections.items():
        for key, value in entries.items():
            yield f"{section}.{key}", value


def _refuse_unknown(sections: Any, known: set[str]) -> None:
    for section, entries in sections.items():
        if section not in known:
            # A key that lacks its section is the likeliest slip.
            fix = _place(str(section), "", known) or suggestion(str(section), _sections(known))
            raise ConfigError(
                f"{section}: unknown key{fix or ': the sections are ' + ', '.join(_sections(known))}"
            )
        if not isinstance(entries, dict):
            raise ConfigError(
                f"{section}: this is a section: put its keys below it, like the output of `copus config`"
            )
        for entry in entries:
            if f"{section}.{entry}" not in known:
                hint = (
                    ": any other Hugging Face field belongs below model.extra" if section == "model" else ""
                )
                fix = _place(str(entry), section, known) or hint or ": `copus config` lists them all"
                raise ConfigError(f"{section}.{entry}: unknown key{fix}")


def _place(entry: str, section: str, known: set[str]) -> str:
    """Where a misplaced or misspelt key probably belongs, as a question, or nothing."""
    elsewhere = sorted(key for key in known if key.endswith(f".{entry}"))
    if elsewhere:
        return f", did you mean {elsewhere[0]}?"
    # The bare name is compared: a common section would make any two keys look alike.
    siblings = [key.partition(".")[2] for key in known if key.startswith(f"{section}.")]
    return suggestion(entry, siblings).replace("mean ", f"mean {section}.")


def _sections(known: set[str]) -> list[str]:
    return sorted(key for key in known if "." not in key)


def _typed_sections(plain: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    sections = typing.get_type_hints(Config)
    return {
        section: {
            key: _typed(f"{section}.{key}", typing.get_type_hints(sections[section])[key], value)
            for key, value in entries.items()
        }
        for section, entries in plain.items()
    }


def _typed(key: str, hint: Any, value: Any) -> Any:
    """`value` as the type that the schema declares, written as YAML or a command line may write it."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    if value is None and type(None) in options:
        return None
    if typing.get_origin(options[0]) is list:
        if not isinstance(value, list):
            raise ConfigError(
                f"{key}: must be a list, got {value!r}: write it like [{'1, 2' if value is None else value}]"
            )
        element = typing.get_args(options[0])[0]
        return [_typed(f"{key}[{position}]", element, each) for position, each in enumerate(value)]
    if typing.get_origin(options[0]) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: must hold keys with values, got {value!r}: use {{}} for none")
        return value
    for option in options:
        converted = _convert(option, value)
        if converted is not None:
            return converted
    wanted = " or ".join(_NAMES[option] for option in options if option in _NAMES)
    null = " or null" if type(None) in options else ""
    quotes = ": put it in quotes" if str in options and isinstance(value, int | float) else ""
    raise ConfigError(f"{key}: must be {wanted}{null}, got {value!r}{quotes}")


def _convert(option: type, value: Any) -> Any:
    """`value` as an `option`, or None where it is none."""
    if option in (str, bool):
        return value if isinstance(value, option) else None
    if option not in (int, float) or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = Decimal(str(value).strip())  # exact, and reads 1_000_000 and 5e8
    except InvalidOperation:
        return None
    if option is float:
        return float(number)
    return int(number) if number.is_finite() and number == number.to_integral_value() else None
