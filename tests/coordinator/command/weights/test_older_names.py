"""Experts' tensors under the names of before, against what transformers itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.coordinator.command.weights.older_names import _FAMILIES, as_before, family_in
from dtfm.coordinator.command.weights.shards import Part, write_shards
from dtfm.coordinator.command.weights.stored import Tensor, look_at

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
OF: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "dots1": DEEPSEEK | {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "flex_olmo": {"num_experts": 4, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    "glm4_moe": DEEPSEEK,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jamba": {"num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "lfm2_moe": {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "minimax": {"num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4},
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 16},
}


def test_all_families_are_tried() -> None:
    assert OF.keys() == _FAMILIES.keys()


QUICK = {"ernie4_5_moe", "mixtral", "phimoe", "qwen3_moe"}
"""One family for each entry of the table, and each kind of names."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.soak) for family in sorted(OF)]
)
def test_the_export_has_the_tensors_that_transformers_saves(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    known = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{key: value for key, value in SMALL.items() if key in known} | OF[family])
    module: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    module.save_pretrained(tmp_path / "saved")
    expected = load_file(tmp_path / "saved/model.safetensors")

    trained = {name: value.detach().contiguous() for name, value in module.named_parameters()}
    save_file(trained, tmp_path / "bucket")
    stored = look_at(fsspec.filesystem("file"), str(tmp_path / "bucket"), (tmp_path / "bucket").stat().st_size)
    tensors = as_before(stored.tensors, family_in(tmp_path / "saved"))
    stored = type(stored)(stored.filesystem, stored.path, stored.size, stored.header, tensors)
    write_shards([Part(stored, tensors, lambda _: None)], tmp_path, None, 1 << 30)
    found = load_file(tmp_path / "model.safetensors")
    buffers = {name for name, _ in module.named_buffers()}
    assert found.keys() == {name for name in expected if name not in buffers}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_what_only_looks_like_experts_stays_whole() -> None:
    odd = Tensor("a.experts.gate_up_proj", "F32", (2, 3, 1), 0, 24)
    flat = Tensor("a.experts.down_proj", "F32", (6,), 0, 24)
    assert as_before([odd, flat], "qwen2_moe") == (odd, flat)
    assert as_before([odd], "llama") == (odd,)
