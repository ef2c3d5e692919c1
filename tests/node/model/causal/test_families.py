"""Families of transformers: each is taken, and then computes what transformers computes, or it is refused with a reason.

docs/running.md has this table's short form.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from dtfm.node.data.samples import Sample
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.protos import plan_pb2
from tests.node.model.test_stage import LENGTH, VOCABULARY, stage_of, train

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = EXPERTS | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
TAKEN: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 16},
    "gemma": GROUPED | {"head_dim": 8},
    "gemma2": GROUPED | {"head_dim": 8},
    "gemma3_text": GROUPED | {"head_dim": 8},
    "gpt2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt_neox": SIZES,
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "phi3": GROUPED | {"pad_token_id": 0},
    "olmo2": GROUPED,
    "granite": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 1},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "bert": SIZES | {"is_decoder": True},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (SIZES, "is not causal: layer 1 sees the tokens that come after"),
    "roberta": (SIZES | {"pad_token_id": 1}, "is not causal: layer 1 sees the tokens that come after"),
    "rwkv": (
        {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
        "cannot be computed one layer at a time",
    ),
    "apertus": (GROUPED, "is not set by the model's own initialisation"),
    "jetmoe": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "intermediate_size": 48,
        },
        "cannot be cut into layers: its forward pass looks at the values of its own tensors",
    ),
}


def load(family: str, config: dict[str, Any]) -> Model:
    spec = plan_pb2.Run.Model(family=family, config_json=json.dumps(config))
    return load_model(spec, Sample((LENGTH,), torch.int64, VOCABULARY))


@pytest.mark.soak
@pytest.mark.parametrize("family", TAKEN)
def test_what_is_taken_computes_as_transformers_does(family: str) -> None:
    model = load(family, TAKEN[family])
    count = len(model.layers)
    tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    stages = [stage_of(model, *ends, dtype=torch.float32) for ends in ((0, 2), (2, count))]
    whole: Any = AutoModelForCausalLM.from_config(model.module.config).eval()
    values = {name: value for each in model.buckets for name, value in model.initial_parameters(each, 5).items()}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(values[name])
        expected = cross_entropy(whole(input_ids=inputs).logits.flatten(0, 1).float(), labels.flatten()).item()
    assert train(stages, inputs, labels) == pytest.approx(expected, rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_says_why(family: str) -> None:
    config, why = REFUSED[family]
    with pytest.raises(ValueError, match=f"model.family: '{family}'.*{why}"):
        load(family, config)
