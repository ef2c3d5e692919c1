"""What config.json says under the names that other programs look for."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.node.model.causal.older_readers import with_older_names

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def default(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | more


def older(family: str, **config: Any) -> dict[str, Any]:
    """What is said beside ``config``."""
    given = {"model_type": family} | config
    found = with_older_names(given)
    assert {key: found[key] for key in given} == given
    return {key: value for key, value in found.items() if key not in given}


@pytest.mark.parametrize(
    ("family", "rotary", "expected"),
    [
        ("qwen2", default(1e6), {"rope_theta": 1e6, "rope_scaling": None}),
        ("llama", LLAMA3 | {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            "phi",
            default(1e4, partial_rotary_factor=0.5),
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        (
            "gpt_neox",
            default(5e4, partial_rotary_factor=0.25),
            {
                "rope_theta": 5e4,
                "rotary_emb_base": 5e4,
                "rope_scaling": None,
                "partial_rotary_factor": 0.25,
                "rotary_pct": 0.25,
            },
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": default(1e4),
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [2.0],
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 1.0,
                "rope_theta": 1e4,
            },
            {
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
        ),
    ],
)
def test_rotary_settings_stand_there_under_the_older_names_too(
    family: str, rotary: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert older(family, rope_parameters=rotary) == expected


def test_so_do_the_precision_and_what_single_families_have_renamed() -> None:
    assert older("gpt2", dtype="bfloat16", n_positions=64) == {"torch_dtype": "bfloat16", "n_ctx": 64}
    assert older("gemma", hidden_act="gelu") == {"hidden_activation": "gelu"}


def test_a_base_that_older_readers_cannot_know_is_said(caplog: pytest.LogCaptureFixture) -> None:
    both = {"full_attention": default(5e5), "sliding_attention": default(1e4)}
    assert older("olmo3", rope_parameters=both) == {"rope_theta": 5e5, "rope_scaling": None}
    assert "layers of olmo3 have rotary bases of 500000.0 and 10000.0" in caplog.text
