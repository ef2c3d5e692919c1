"""`plan` refuses a model without transformers in the way that transformers does: scheduler/formats/model_config.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.node.data.problems import in_one_line
from dtfm.scheduler.formats.language_model import FAMILIES, language_model_layers
from dtfm.scheduler.formats.model_config import NoSuchModel

TINY: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 64,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"hidden_size": 100, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None},
    {"hidden_size": 90, "num_key_value_heads": 6},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 12},
    {"head_dim": 15},
    {"head_dim": 3},
    {"head_dim": 20},
    {"initializer_range": 2.0},
    {"initializer_range": -1.0},
    {"initializer_range": 1},
    {"rms_norm_eps": 1},
    {"rms_norm_eps": "x"},
    {"max_position_embeddings": 0.5},
    {"max_position_embeddings": 8},
    {"tie_word_embeddings": "yes"},
]


def by_transformers(family: str, config: dict[str, Any]) -> tuple[str, bool]:
    """Why transformers does not take it (empty: it does), and whether that is said when the model is built."""
    built = False
    try:
        of_family = AutoConfig.for_model(family, **config, vocab_size=64)
        model, built = AutoModelForCausalLM.from_config(of_family), True
        model(torch.zeros(1, 16, dtype=torch.long))
    except Exception as problem:
        return in_one_line(problem), not built
    return "", False


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_refused_where_transformers_refuses_it_and_by_its_sentence(
    family: str, config: dict[str, Any]
) -> None:
    settings = {key: value for key, value in (TINY | config).items() if value is not None}
    theirs, said = by_transformers(family, settings)
    try:
        language_model_layers(family, settings, 64, 16, 1, bf16=False)
        ours = ""
    except NoSuchModel as problem:
        ours = str(problem)
    assert bool(ours) == bool(theirs), (ours, theirs)
    if said:
        assert ours.removeprefix(f"model.config: {family!r} does not take it: ") in theirs


@pytest.mark.parametrize(
    ("rope", "complaint"),
    [
        ({"rope_type": "xpos"}, "transformers knows no rope_type 'xpos'; choose one of default, linear"),
        ({"type": "xpos"}, "transformers knows no rope_type 'xpos'"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs factor as well"),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "rope_type 'llama3' needs low_freq_factor and high_freq_factor as well",
        ),
        ({"rope_type": "linear", "factor": 2.0}, ""),
        ({"factor": 2.0}, ""),
    ],
    ids=str,
)
def test_rotary_embeddings_that_transformers_cannot_make_are_refused_by_name(
    rope: dict[str, Any], complaint: str
) -> None:
    """transformers says `KeyError: 'xpos'`."""
    assert bool(by_transformers("llama", TINY | {"rope_scaling": dict(rope)})[0]) == bool(complaint)
    with pytest.raises(NoSuchModel, match=complaint) if complaint else nullcontext():
        language_model_layers("llama", TINY | {"rope_scaling": rope}, 64, 16, 1, bf16=False)
