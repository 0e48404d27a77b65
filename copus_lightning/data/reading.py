"""Reads text, tokenizers and token files; whatever is wrong with them is one line that names the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def existing_path(path: str | Path) -> Path:
    """The path, or ValueError naming ``data.path`` if there is nothing."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"data.path: {path} does not exist; give an existing file or folder")
    return path


def documents(path: str | Path) -> Iterator[bytes]:
    """The documents of a text file, or of the text files under a folder, in UTF-8; see `TextCorpus`.

    Raises:
        ValueError: If the path is missing or holds no text, or a line of a ``.jsonl`` file is malformed.
    """
    path = existing_path(path)
    if path.is_dir():
        names = sorted(
            name
            for name in (found.relative_to(path) for found in path.rglob("*") if found.is_file())
            if name.suffix in TEXT_SUFFIXES and not any(part.startswith(".") for part in name.parts)
        )
        files = [path / name for name in names]
    else:
        files = [path]
    n_documents = 0
    for file in files:
        for document in _json_lines(file) if file.suffix == ".jsonl" else [file.read_bytes()]:
            n_documents += 1
            yield document
    if n_documents == 0:
        raise ValueError(f"data.path: {path} holds no text; give one with {', '.join(TEXT_SUFFIXES)} files")


def _json_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"].encode("utf-8")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                message = 'is not an object with a string "text"; correct or remove it'
                raise ValueError(f"data.path: {file} line {number} {message}") from error
            yield text


def load_tokenizer(name: str | Path) -> Any:
    """A Hugging Face tokenizer with an end-of-sequence token; ValueError if it is not one."""
    from transformers import AutoTokenizer

    try:
        encoder = AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer: {name} cannot be loaded; give a Hugging Face tokenizer's folder"
        ) from error
    if encoder.eos_token_id is None:
        raise ValueError(f"data.tokenizer: {name} has no end-of-sequence token; give one that has")
    return encoder


def mapped_tokens(path: str | Path, dtype: str) -> np.ndarray:
    """The token ids of a ``.npy`` or ``.bin`` file, memory-mapped: shape ``[n_tokens]``; see `TokenFile`."""
    path = existing_path(path)
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"data.path: {path} is not a readable .npy file; write it with numpy.save"
            ) from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(
                f"data.path: {path} holds {tokens.dtype} of shape {tokens.shape}; give one row of integers"
            )
        return tokens
    if path.suffix != ".bin":
        raise ValueError(
            f"data.path: {path} is neither .npy nor .bin; give one of these for data.kind=tokens"
        )
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"data.dtype: {dtype} is unknown; use uint16 or uint32")
    item_type = np.dtype(dtype).newbyteorder("<")
    n_bytes = path.stat().st_size
    if n_bytes == 0 or n_bytes % item_type.itemsize:
        raise ValueError(
            f"data.dtype: the {n_bytes} bytes of {path} are no whole number of {dtype}; check data.dtype"
        )
    return np.memmap(path, dtype=item_type, mode="r")
