"""A model that sees the tokens to come, or that stages cannot compute, is refused when it is loaded, with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dtfm.node.data.samples import Sample
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.protos import plan_pb2

TEXT = Sample((12,), torch.int64, 61)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GEMMA = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}


def load(family: str, **config: Any) -> Model:
    return load_model(plan_pb2.Run.Model(family=family, config_json=json.dumps(config)), TEXT)


@pytest.mark.parametrize(
    ("family", "config", "complaint"),
    [
        ("bert", SIZES, r"'bert' is not causal: layer 1 sees the tokens that come after.*set is_decoder = true in"),
        ("roberta", SIZES | {"pad_token_id": 1}, r"'roberta' is not causal: .*set is_decoder = true in"),
        (
            "gemma3_text",
            GEMMA | {"use_bidirectional_attention": True},
            r"'gemma3_text' is not causal: layer 1 sees .*; choose another family",
        ),
        (
            "rwkv",
            {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
            r"'rwkv' cannot be computed one layer at a time \(.*\); choose another family",
        ),
        (
            "apertus",
            SIZES | {"num_key_value_heads": 2},
            r"'apertus': parameter .*alpha_p is not set by the model's own",
        ),
        (
            "jetmoe",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "kv_channels": 8,
                "intermediate_size": 48,
            },
            r"'jetmoe' cannot be cut into layers: its forward pass looks at the values .*\(modeling_jetmoe.py, line \d+\)",
        ),
        (
            "llama",
            SIZES | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            r'rope_type "dynamic" changes with the length of each text.*set rope_type to "linear" or "yarn"',
        ),
    ],
)
def test_a_family_that_cannot_be_trained_in_stages_is_refused(
    family: str, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        load(family, **config)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bert", SIZES | {"is_decoder": True}),
        ("gemma3_text", GEMMA),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    ],
)
def test_a_causal_one_is_taken(family: str, config: dict[str, Any]) -> None:
    assert len(load(family, **config).layers) == 4


def test_what_the_family_keeps_from_decaying_is_known_by_name() -> None:
    """Mamba's decay rates are a matrix."""
    model = load("mamba", hidden_size=32, num_hidden_layers=2, state_size=8)
    kept = {name for bucket in model.buckets for name in bucket.kept}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log"}
    assert not any(bucket.kept for bucket in load("llama", **SIZES).buckets)
