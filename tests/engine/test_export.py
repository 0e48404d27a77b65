"""A checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from world import World

from copus_lightning.core.layout import Layout
from copus_lightning.engine.checkpoint import Checkpointer
from copus_lightning.engine.export import export

from . import tiny
from .tiny import TIED, UNTIED, Tiny


def trained(path: str, model: Tiny) -> dict[str, torch.Tensor]:
    """Saves a checkpoint; returns the whole weights."""
    with tiny.running(Layout(1, 2, 2), model, micro_batch_size=4) as engine:
        checkpointer = Checkpointer(engine)
        tiny.train(engine, [tiny.make_batch()])
        checkpointer.save(path)
        checkpointer.close()
        return engine.gather()


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_from_pretrained_loads_an_export_with_equal_logits(world: World, tmp_path: Path, model: Tiny) -> None:
    from transformers import AutoModelForCausalLM

    weights = world.run(trained, str(tmp_path / "checkpoint"), model)[0]
    here = model.build()
    here.load_state_dict(weights, strict=False)
    ids = tiny.make_batch()["input_ids"]

    written = export(tmp_path / "checkpoint", tmp_path / "whole")
    assert [path.name for path in written] == ["model.safetensors", "config.json"]
    assert len({path.stat().st_mode for path in written}) == 1, "whoever may read one may read the other"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert loaded.dtype == torch.float32 and type(loaded) is type(here)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, here(ids).logits)

    written = export(tmp_path / "checkpoint", tmp_path / "parts", "bfloat16", max_file_bytes=40_000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    n_parameters = sum(value.numel() for value in weights.values())
    assert index["metadata"] == {"total_parameters": n_parameters, "total_size": 2 * n_parameters}
    assert index["weight_map"].keys() == weights.keys()
    parts = [path for path in written if path.suffix == ".safetensors"]
    assert len(parts) > 2 and all(path.stat().st_size < 50_000 for path in parts)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype="auto")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, weights[name].bfloat16()), name

    with pytest.raises(ValueError, match="is not an empty folder: choose another one"):
        export(tmp_path / "checkpoint", tmp_path / "whole")
    with pytest.raises(ValueError, match="dtype='int8' is not known: use float32"):
        export(tmp_path / "checkpoint", tmp_path / "other", "int8")
    (tmp_path / "checkpoint" / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__1_0\.distcp is missing"):
        export(tmp_path / "checkpoint", tmp_path / "other")
    assert not (tmp_path / "other").exists()
