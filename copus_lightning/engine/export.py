"""From a checkpoint to a plain Hugging Face folder, on one process and without a process group."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from copus_lightning.engine import checkpoint_format as files
from copus_lightning.engine.checkpoint_format import Manifest
from copus_lightning.engine.checkpoint_planners import read_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_FILE_BYTES = 5 * 10**9


def check_export(
    checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], dtype: str
) -> tuple[Path, Manifest]:
    """Reads the manifest, and checks that there is a place for the export.

    Returns:
        The checkpoint's folder and its manifest.

    Raises:
        ValueError: One line that says what is wrong.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known: use {', '.join(DTYPES)}")
    source, target = files.resolve(checkpoint), files.absolute(folder)
    manifest = Manifest.read(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder: choose another one")
    return source, manifest


def export(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Writes safetensors and ``config.json``, which ``AutoModelForCausalLM.from_pretrained(folder)`` loads.

    The folder appears once it is complete. Memory is needed for one of its files at a time.

    Args:
        checkpoint: A folder that a run has written.
        folder: Where to write; it must not exist, or be empty.
        dtype: Of the weights: ``float32``, as the masters are, ``bfloat16`` or ``float16``.
        max_file_bytes: Weights beyond this size are spread over several files, with an index.

    Returns:
        The files, weights first.

    Raises:
        ValueError: The checkpoint is not whole, or something is in the way.
    """
    source, manifest = check_export(checkpoint, folder, dtype)
    files.check_files(source, manifest)
    target = files.absolute(folder)
    temporary = files.saving(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    shapes = {name: tuple(shape) for name, shape in manifest.tensors.items()}
    if not manifest.model["config"].get("tie_word_embeddings"):  # tied by the user's own hand
        shapes |= {name: shapes[first] for name, first in manifest.model["tied"].items()}
    parts = list(_parts(shapes, DTYPES[dtype].itemsize, max_file_bytes))
    names = [
        "model.safetensors" if len(parts) == 1 else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        for i in range(len(parts))
    ]
    for file, part in zip(names, parts, strict=True):
        weights = {}
        for name in part:
            stored = manifest.model["tied"].get(name, name)
            whole = read_tensors(source, {stored: shapes[name]})[stored]
            weights[name] = whole.to(DTYPES[dtype])
        save_file(weights, temporary / file, metadata={"format": "pt"})
    if len(parts) > 1:
        numels = sum(prod(shape) for shape in shapes.values())
        index = {
            "metadata": {"total_parameters": numels, "total_size": numels * DTYPES[dtype].itemsize},
            "weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part},
        }
        names.append("model.safetensors.index.json")
        (temporary / names[-1]).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    config = {**manifest.model["config"], "architectures": [manifest.model["class"]], "dtype": dtype}
    names.append("config.json")
    (temporary / names[-1]).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    mode = (temporary / names[-1]).stat().st_mode
    for name in names:  # safetensors' own are for the user alone
        (temporary / name).chmod(mode)
    if target.exists():
        target.rmdir()
    temporary.rename(target)
    return [target / name for name in names]


def _parts(shapes: dict[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order; a tensor that is larger than a file has one for itself."""
    part: list[str] = []
    size = 0
    for name, shape in shapes.items():
        numel_bytes = prod(shape) * itemsize
        if part and size + numel_bytes > max_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += numel_bytes
    yield part
