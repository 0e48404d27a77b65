from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from copus_lightning.data import (
    ElasticDataLoader,
    TextCorpus,
    TokenDataset,
    TokenFile,
    build_corpus,
    byte_corpus,
    check_vocabulary,
    unigram_entropy,
)


def test_byte_corpus_is_the_standard_library() -> None:
    train, validation = byte_corpus(128), byte_corpus(128, "validation")
    assert 5e6 < len(train.tokens) < 5e7
    assert 0.02 < len(validation.tokens) / len(train.tokens) < 0.1
    assert train.vocab_size == 257 and train.max_token() == validation.max_token() == 256
    assert train.tokens.dtype == np.uint16
    # Ends with the end-of-text token, and a window may hold one in its middle.
    assert train.tokens[-1] == validation.tokens[-1] == 256
    assert b"import" in bytes(train.tokens[train.tokens < 256].astype(np.uint8))
    assert byte_corpus(64).tokens is train.tokens, "read once"
    with pytest.raises(ValueError, match="give train or validation"):
        byte_corpus(128, "test")


def test_byte_corpus_entropy_is_as_stated_and_alike_in_both_splits() -> None:
    train, validation = unigram_entropy(byte_corpus(128)), unigram_entropy(byte_corpus(128, "validation"))
    assert train == pytest.approx(3.24, abs=0.05)
    assert validation == pytest.approx(train, abs=0.1)


def test_items_are_windows_with_their_own_labels() -> None:
    dataset = TokenDataset(np.arange(10, dtype=np.uint16), 4)
    assert len(dataset) == 2
    item = dataset[1]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["input_ids"].tolist() == item["labels"].tolist() == [4, 5, 6, 7]
    item["labels"][0] = -100
    assert item["input_ids"][0] == 4 and dataset.tokens[4] == 4
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(IndexError):
        dataset[-1]
    assert [sample["input_ids"][0].item() for sample in dataset] == [0, 4]


def test_split_holds_out_the_end() -> None:
    train, validation = TokenDataset(np.arange(103), 5, vocab_size=200).split(0.1)
    assert (len(train), len(validation)) == (18, 2)
    assert validation.tokens.tolist() == list(range(90, 100)) and validation.vocab_size == 200
    assert [len(part) for part in TokenDataset(np.arange(4), 2).split(0.001)] == [1, 1]
    with pytest.raises(ValueError, match=r"data\.validation_fraction: 1\.5"):
        train.split(1.5)
    with pytest.raises(ValueError, match="one sample cannot be split"):
        TokenDataset(np.arange(4), 3).split(0.5)


def test_unigram_entropy_against_closed_forms() -> None:
    assert unigram_entropy(TokenDataset(np.arange(64, dtype=np.uint32), 8)) == pytest.approx(math.log(64))
    assert unigram_entropy(TokenDataset(np.zeros(64, dtype=np.uint16), 8)) == 0.0
    # What no sample uses does not count.
    assert unigram_entropy(TokenDataset(np.array([1, 1, 2, 2, 9]), 4)) == pytest.approx(math.log(2))


def test_folder_of_text_is_sorted_and_ended(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "z.txt").write_text("zz")
    (tmp_path / "a.md").write_text("é")
    (tmp_path / "c.jsonl").write_text('{"text": "x", "id": 1}\n\n{"text": "y"}\n')
    (tmp_path / "data.csv").write_text("not text")
    (tmp_path / ".hidden" / "a.txt").write_text("not this")
    corpus = TextCorpus(tmp_path, 2)
    assert corpus.tokens.tolist() == [*"é".encode(), 256, *b"zz", 256, *b"x", 256, *b"y", 256]
    assert corpus.vocab_size == 257
    assert TextCorpus(tmp_path / "data.csv", 2).tokens.tolist() == [*b"not text", 256], (
        "a single file of any name"
    )


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_file_is_mapped_and_survives_pickling(tmp_path: Path, suffix: str, dtype: str) -> None:
    tokens = np.arange(1000, dtype=dtype)
    path = tmp_path / f"tokens{suffix}"
    if suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    dataset = TokenFile(path, 10, dtype=dtype)
    assert isinstance(dataset.tokens, np.memmap)
    assert (len(dataset), dataset.max_token(), dataset.vocab_size) == (100, 999, None)
    train, validation = dataset.split(0.2)
    for part, start in ((train, 0), (validation, 800)):
        pickled = pickle.dumps(part)
        assert len(pickled) < 1000
        again = pickle.loads(pickled)
        assert np.array_equal(again.tokens, part.tokens) and isinstance(again.tokens, np.memmap)
        assert again[3]["input_ids"].tolist() == list(range(start + 30, start + 40))
    nested = validation.split(0.5)[1]
    assert pickle.loads(pickle.dumps(nested)).tokens.tolist() == list(range(900, 1000))


def test_token_file_through_spawned_workers(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    dataset = TokenFile(tmp_path / "tokens.bin", 10)
    loader = ElasticDataLoader(
        DataLoader(dataset, num_workers=1, multiprocessing_context="spawn"), 0, 1, 5, 0
    )
    batches = [batch["input_ids"] for batch in loader]
    assert torch.cat(batches).flatten().tolist() == list(range(100))


def test_vocabulary_is_checked() -> None:
    check_vocabulary(TokenDataset(np.array([0, 7]), 2), 8)
    with pytest.raises(
        ValueError, match=r"model\.vocab_size: 7 is too small for the corpus; give at least 8"
    ):
        check_vocabulary(TokenDataset(np.array([0, 7]), 2), 7)
    with pytest.raises(ValueError, match="give at least 257"):
        check_vocabulary(byte_corpus(16), 256)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2, "<end>": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, special in (("with_end", {"eos_token": "<end>"}), ("without_end", {})):
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **special).save_pretrained(
            tmp_path / name
        )
    return tmp_path


def test_text_through_a_tokenizer(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "1.txt").write_text("a b c")
    (tmp_path / "text" / "2.txt").write_text("b")
    corpus = TextCorpus(tmp_path / "text", 2, tokenizer=tokenizer_folder / "with_end")
    assert corpus.tokens.tolist() == [0, 1, 2, 3, 1, 3]
    assert corpus.vocab_size == 4 and corpus.tokens.dtype == np.uint16
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*without_end has no end-of-sequence token"):
        TextCorpus(tmp_path / "text", 2, tokenizer=tokenizer_folder / "without_end")
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*missing cannot be loaded"):
        TextCorpus(tmp_path / "text", 2, tokenizer=tokenizer_folder / "missing")


def test_build_corpus(tmp_path: Path) -> None:
    train, validation = build_corpus("bytes", None, 32)
    assert len(train) > len(validation) > 0 and train.sequence_length == 32
    (tmp_path / "a.txt").write_text("x" * 399)
    train, validation = build_corpus("text", tmp_path, 4, validation_fraction=0.25)
    assert (len(train), len(validation), validation.tokens[-1]) == (75, 25, 256)
    np.arange(400, dtype=np.uint32).tofile(tmp_path / "a.bin")
    train, validation = build_corpus("tokens", tmp_path / "a.bin", 4, dtype="uint32")
    assert (len(train), len(validation), validation.tokens[-1]) == (95, 5, 399)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"kind": "parquet"}, r"data\.kind: 'parquet' is unknown; use bytes, text or tokens"),
        ({"kind": "bytes", "path": "x.txt"}, r"data\.path: .*leave it out"),
        ({"kind": "text"}, r"data\.path: data\.kind=text needs one; give a file or folder"),
        ({"kind": "tokens"}, r"data\.path: data\.kind=tokens needs one; give a file$"),
        ({"kind": "text", "path": "nowhere"}, r"data\.path: nowhere does not exist; give"),
        ({"kind": "tokens", "path": "nowhere.bin"}, r"data\.path: nowhere\.bin does not exist; give"),
        ({"kind": "text", "path": "empty"}, r"data\.path: empty holds no text; give one with \.txt"),
        (
            {"kind": "text", "path": "short.txt"},
            r"data\.sequence_length: 8 is more than the corpus has \(4\)",
        ),
        (
            {"kind": "text", "path": "short.txt", "sequence_length": 1},
            r"data\.sequence_length: 1 leaves nothing",
        ),
        (
            {"kind": "text", "path": "bad.jsonl"},
            r"data\.path: bad\.jsonl line 2 is not an object with a string",
        ),
        ({"kind": "text", "path": "other.jsonl"}, r"data\.path: other\.jsonl line 1 is not an object"),
        ({"kind": "tokens", "path": "short.txt"}, r"data\.path: short\.txt is neither \.npy nor \.bin"),
        (
            {"kind": "tokens", "path": "odd.bin"},
            r"data\.dtype: the 3 bytes of odd\.bin are no whole number of uint16",
        ),
        (
            {"kind": "tokens", "path": "odd.bin", "dtype": "float32"},
            r"data\.dtype: float32 is unknown; use uint16",
        ),
        (
            {"kind": "tokens", "path": "table.npy"},
            r"data\.path: table\.npy holds float64 of shape \(2, 2\)",
        ),
        ({"kind": "tokens", "path": "fake.npy"}, r"data\.path: fake\.npy is not a readable \.npy file"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], names: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "a"}) + "\nnot json\n")
    (tmp_path / "other.jsonl").write_text(json.dumps({"content": "a"}) + "\n")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "fake.npy").write_bytes(b"abc")
    np.save(tmp_path / "table.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=names) as error:
        build_corpus(**{"path": None, "sequence_length": 8, **arguments})
    assert "\n" not in str(error.value)
