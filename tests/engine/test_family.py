"""Models that would not stay themselves in stages or shards are refused; see test_golden.py for those that do."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from copus_lightning.engine import family
from copus_lightning.engine.family import check_family
from copus_lightning.engine.model import ModelDescription

from .tiny import Tiny

HEADS = ("head_dim", 8)


def check(model: Any) -> str | None:
    ModelDescription(model)
    return check_family(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            Tiny(family="granite", options=(("embedding_multiplier", 12.0),)),
            "in 3 stages gives logits that are",
        ),
        (
            Tiny(family="apertus"),
            "in 2 shards gives model.layers.0.mlp.act_fn.alpha_p a part of its gradient",
        ),
        (Tiny(family="doge"), "in 2 shards fails (RuntimeError"),
        (Tiny(family="gemma"), "model.embed_tokens cannot be cut over tensor ranks"),
        (Tiny(family="glm4"), "cut by the rule 'colwise_gather_output', which is not supported"),
        (Tiny(options=(("attention_dropout", 0.1),)), "is random in training (attention_dropout=0.1)"),
        (Tiny(family="gpt_neox", options=(("hidden_dropout", 0.1),)), "is a dropout of 0.1"),
    ],
    ids=lambda value: value.family if isinstance(value, Tiny) else "",
)
def test_a_model_that_would_be_another_one_is_refused(model: Tiny, reason: str) -> None:
    built = model.build()
    before = copy.deepcopy(built.state_dict())
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        check(built)
    assert "\n" not in str(error.value)
    assert torch.equal(torch.get_rng_state(), random) and built.training
    assert all(torch.equal(before[name], value) for name, value in built.state_dict().items())


def test_a_rule_that_its_plan_lacks_is_missed() -> None:
    model = Tiny(family="qwen3", options=(HEADS,)).build()
    plan = model.config.base_model_tp_plan
    model.config.base_model_tp_plan = {k: v for k, v in plan.items() if not k.endswith("k_norm")}
    with pytest.raises(
        ValueError, match=r"gives model\.layers\.0\.self_attn\.k_norm\.weight a part of its gradient"
    ):
        check(model)


def test_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny().build()
    forward = type(model).forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        outputs.loss = None if outputs.loss is None else 2 * outputs.loss
        return outputs

    monkeypatch.setattr(family, "_passed", {})
    monkeypatch.setattr(type(model), "forward", scaled)
    with pytest.raises(ValueError, match="the loss of llama is not the mean cross entropy of the next token"):
        check(model)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "vocab_size": 32_000},
        {"pad_token_id": 31_999, "eos_token_id": [1, 2], "attention_bias": True, "mlp_bias": True},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["7B", "tokens", "rope"],
)
def test_full_sizes_are_tried_small_and_on_meta(options: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**options))
    assert check(model) is None
    assert all(p.is_meta for p in model.parameters())


def test_what_cannot_be_made_small_is_said_and_let_through() -> None:
    model = Tiny().build()
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 4}
    said = check(model)
    assert said is not None and "could not be tried" in said and "\n" not in said


def test_what_is_no_causal_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel has no list of layers"):
        ModelDescription(Tiny().build().model)
