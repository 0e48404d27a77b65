"""Models that would not stay themselves in stages or shards are refused; see test_golden.py for those that do."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

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
            "in 2 shards gives model.layers.0.mlp.act_fn.alpha_p another gradient",
        ),
        (Tiny(family="doge"), "in 2 shards fails (RuntimeError"),
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
        ValueError, match=r"gives model\.layers\.0\.self_attn\.k_norm\.weight another gradient"
    ):
        check(model)


def test_a_rule_that_would_sum_a_whole_gradient_is_refused() -> None:
    model = Tiny(family="qwen3", options=(HEADS,)).build()
    rule = {"layers.*.input_layernorm": "replicated_with_grad_allreduce"}
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, **rule}
    with pytest.raises(ValueError, match=r"gives model\.layers\.0\.input_layernorm\.weight another gradient"):
        check(model)


class NormalisedHead(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) / self.weight.norm()


class Masked(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        outputs = super().forward(*args, **kwargs)
        outputs.logits = torch.cat([outputs.logits[..., :-5], outputs.logits[..., -5:] - 100], dim=-1)
        outputs.loss = None
        return outputs


class WithoutLoss(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(*args, **{**kwargs, "labels": None})


def test_heads_and_logits_that_need_the_whole_vocabulary_are_refused() -> None:
    model = Tiny().build()
    model.lm_head = NormalisedHead(32, 97, bias=False)
    with pytest.raises(ValueError, match="lm_head is a NormalisedHead with a forward pass of its own"):
        check(model)
    with pytest.raises(ValueError, match="with its vocabulary in 2 shards gives logits that are"):
        check(Masked(Tiny().build().config))


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, partial(torch.autocast, "cpu")])
def test_what_the_script_has_set_is_not_seen(around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_found", {})
    model = WithoutLoss(Tiny().build().config)
    with around(), torch.device("meta"):
        assert check(model) is None


def test_scaled_embeddings_on_meta_keep_their_scale() -> None:
    options = Tiny(family="gemma3_text", options=(HEADS,))
    whole = options.build()
    with torch.device("meta"):
        model = type(whole)(whole.config)
    description = ModelDescription(model)
    assert model.model.embed_tokens.embed_scale.is_meta, "nothing is changed yet"
    description.take_weights()
    assert model.model.embed_tokens.embed_scale == whole.model.embed_tokens.embed_scale


def test_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny().build()
    forward = type(model).forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        outputs.loss = None if outputs.loss is None else 2 * outputs.loss
        return outputs

    monkeypatch.setattr(family, "_found", {})
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
