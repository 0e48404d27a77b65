"""Token datasets: the built-in byte corpus, text as bytes or through a tokenizer, and files of tokens.

All are map-style datasets whose item ``t`` is the ``t``-th window of ``sequence_length`` tokens, as
``{"input_ids", "labels"}``, both of shape ``[sequence_length]`` and int64. The two are equal: the model
shifts the labels by one, as Hugging Face models do. Windows do not overlap, and what is left at the end is
not used.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from copus_lightning.data.reading import documents, load_tokenizer, mapped_tokens

END_OF_TEXT = 256  # follows every document of a byte corpus
BYTE_VOCAB_SIZE = 257

_CHUNK = 1 << 24  # tokens looked at in one go, so that a mapped file never stands in memory as a whole


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Consecutive windows of one sequence of tokens.

    Attributes:
        tokens: Shape ``[n_tokens]``, any integer type; may be memory-mapped.
        sequence_length: Tokens per sample.
        vocab_size: Size of the vocabulary that the tokens are from, or None if the corpus does not know.

    Raises:
        ValueError: If there are not enough tokens for one sample.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, vocab_size: int | None = None) -> None:
        if sequence_length < 2:
            raise ValueError(
                f"data.sequence_length: {sequence_length} leaves nothing to predict; give at least 2"
            )
        if len(tokens) < sequence_length:
            raise ValueError(
                f"data.sequence_length: {sequence_length} is more than the corpus has ({len(tokens)}); "
                "give a shorter length or more text"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.sequence_length
        input_ids = torch.from_numpy(self.tokens[start : start + self.sequence_length].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def max_token(self) -> int:
        """The largest token id, from a pass over all tokens."""
        return max(int(chunk.max()) for chunk in _chunks(self.tokens))

    def split(self, validation_fraction: float) -> tuple[TokenDataset, TokenDataset]:
        """The samples before the last fraction, and those in it (at least one on each side).

        Raises:
            ValueError: If the fraction is not between 0 and 1, or there is only one sample.
        """
        n = len(self)
        if not 0 < validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction: {validation_fraction} is not between 0 and 1; 0.05 is usual"
            )
        if n < 2:
            raise ValueError(
                "data.path: one sample cannot be split; give more text or a shorter data.sequence_length"
            )
        n_validation = min(n - 1, max(1, round(n * validation_fraction)))
        cut = (n - n_validation) * self.sequence_length
        return self._part(0, cut), self._part(cut, n * self.sequence_length)

    def _part(self, start: int, stop: int) -> TokenDataset:
        return TokenDataset(self.tokens[start:stop], self.sequence_length, self.vocab_size)


def byte_corpus(sequence_length: int, split: str = "train") -> TokenDataset:
    """The Python standard library's own sources as bytes: about 12 MB of real text with nothing to download.

    Tests are left out; each file is followed by `END_OF_TEXT`, so the vocabulary has 257 tokens. Every
    twentieth file by size is held out for validation: sizes differ a thousandfold, and so both splits have
    their share of large and small ones. The text is that of the running Python: other versions have another
    corpus.

    Args:
        sequence_length: Tokens per sample.
        split: ``train`` or ``validation``.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split: {split!r} is not one of the two; give train or validation")
    return TokenDataset(_standard_library()[split], sequence_length, BYTE_VOCAB_SIZE)


@lru_cache(maxsize=1)
def _standard_library() -> dict[str, np.ndarray]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = sorted(path for path in paths if not left_out & set(path.parts[:-1]))
    if not paths:
        raise ValueError(
            f"data.kind: this Python has no sources under {root}; use data.kind=text with a data.path"
        )
    texts = [(root / path).read_bytes() for path in paths]
    # The largest files weigh most, so the strata are counted from them; one from the middle of each.
    by_size = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    held_out = set(by_size[9::20])
    return {
        "train": _bytes_with_ends([text for number, text in enumerate(texts) if number not in held_out]),
        "validation": _bytes_with_ends([text for number, text in enumerate(texts) if number in held_out]),
    }


class TextCorpus(TokenDataset):
    """A text file, or all text files under a folder, as bytes or through a tokenizer; held in memory.

    Under a folder these are ``*.txt``, ``*.md``, ``*.py`` and ``*.jsonl``, sorted by path, without hidden
    ones. A file is one document; of a ``.jsonl`` file each line is one, its ``text`` field. Documents are
    followed by `END_OF_TEXT`, or by the tokenizer's end-of-sequence token. For more text than fits in memory,
    tokenise it once and use a `TokenFile`.

    Args:
        path: File or folder.
        sequence_length: Tokens per sample.
        tokenizer: None for bytes, else name or folder of a Hugging Face tokenizer.

    Raises:
        ValueError: If the path is missing or holds no text, a line is malformed, or the tokenizer has no end
            token.
    """

    def __init__(self, path: str | Path, sequence_length: int, tokenizer: str | Path | None = None) -> None:
        texts = list(documents(path))
        if tokenizer is None:
            super().__init__(_bytes_with_ends(texts), sequence_length, BYTE_VOCAB_SIZE)
            return
        encoder = load_tokenizer(tokenizer)
        dtype = np.uint16 if len(encoder) <= 1 << 16 else np.uint32
        parts = []
        for text in texts:
            ids = encoder.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
            parts.append(np.array([*ids, encoder.eos_token_id], dtype=dtype))
        super().__init__(np.concatenate(parts), sequence_length, len(encoder))


class TokenFile(TokenDataset):
    """A memory-mapped file of token ids: ``.npy`` (one-dimensional, integer) or raw little-endian ``.bin``.

    The file is read as samples are asked for; worker processes map it themselves.

    Args:
        path: The file.
        sequence_length: Tokens per sample.
        dtype: ``uint16`` or ``uint32``, for ``.bin``; a ``.npy`` file says it itself.
        start: First token used.
        stop: End of the tokens used, None for the end of the file.

    Raises:
        ValueError: If the file is missing or is not one of the two kinds.
    """

    def __init__(
        self,
        path: str | Path,
        sequence_length: int,
        dtype: str = "uint16",
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._arguments = (Path(path), sequence_length, dtype, start, stop)
        super().__init__(mapped_tokens(path, dtype)[start:stop], sequence_length)

    def _part(self, start: int, stop: int) -> TokenDataset:
        path, sequence_length, dtype, offset, _ = self._arguments
        return TokenFile(path, sequence_length, dtype, offset + start, offset + stop)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped array would be pickled with its contents.
        return type(self), self._arguments


def unigram_entropy(dataset: TokenDataset) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best guess without context.

    ``-Σ p ln p`` over the tokens that the dataset's samples use.
    """
    counts = np.zeros(0, dtype=np.int64)
    for chunk in _chunks(dataset.tokens[: len(dataset) * dataset.sequence_length]):
        # Converted first: uint32 cannot be counted safely on every platform.
        new = np.bincount(chunk.astype(np.int64), minlength=len(counts))
        new[: len(counts)] += counts
        counts = new
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0


def check_vocabulary(dataset: TokenDataset, vocab_size: int) -> None:
    """Refuse a model whose vocabulary is too small for the corpus.

    Passes over all tokens if the corpus does not know its vocabulary.

    Raises:
        ValueError: If a token id can be ``vocab_size`` or more.
    """
    needed = dataset.vocab_size or dataset.max_token() + 1
    if needed > vocab_size:
        raise ValueError(
            f"model.vocab_size: {vocab_size} is too small for the corpus; give at least {needed}"
        )


def build_corpus(
    kind: str,
    path: str | Path | None = None,
    sequence_length: int = 128,
    *,
    tokenizer: str | Path | None = None,
    dtype: str = "uint16",
    validation_fraction: float = 0.05,
) -> tuple[TokenDataset, TokenDataset]:
    """The training and validation datasets that a configuration asks for.

    Args:
        kind: ``bytes`` (built in), ``text`` (`TextCorpus`) or ``tokens`` (`TokenFile`).
        path: File or folder of the latter two.
        sequence_length: Tokens per sample.
        tokenizer: See `TextCorpus`.
        dtype: See `TokenFile`.
        validation_fraction: Of ``text`` and ``tokens``, the share of samples at the end that is held out;
            ``bytes`` has its own split by files.

    Raises:
        ValueError: One line naming the key under ``data`` that is wrong and what to do.
    """
    if kind == "bytes":
        if path is not None:
            raise ValueError(
                "data.path: the built-in bytes corpus has no path; leave it out or use data.kind=text"
            )
        return byte_corpus(sequence_length, "train"), byte_corpus(sequence_length, "validation")
    if kind not in ("text", "tokens"):
        raise ValueError(f"data.kind: {kind!r} is unknown; use bytes, text or tokens")
    if path is None:
        raise ValueError(
            f"data.path: data.kind={kind} needs one; give a file" + " or folder" * (kind == "text")
        )
    corpus: TokenDataset
    if kind == "text":
        corpus = TextCorpus(path, sequence_length, tokenizer)
    else:
        corpus = TokenFile(path, sequence_length, dtype)
    return corpus.split(validation_fraction)


def _bytes_with_ends(documents: list[bytes]) -> np.ndarray:
    parts = []
    for document in documents:
        parts.append(np.frombuffer(document, dtype=np.uint8).astype(np.uint16))
        parts.append(np.array([END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(parts)


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens[start : start + _CHUNK] for start in range(0, len(tokens), _CHUNK))
