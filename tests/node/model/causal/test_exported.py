"""The settings that go home with the weights, as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dtfm.node.model.load import load_model
from dtfm.protos import plan_pb2
from tests.node.model.causal.test_pretrained import TEXT, load, save

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROTARY: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_theta": 1e6},
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "gemma3_text": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4, "head_dim": 8},
}
DEEPSEEK = SMALL | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
STOPS = {"eos_token_id": [5, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.95}


def spoil(folder: Path, chosen: Callable[[str], bool], value: torch.Tensor) -> None:
    """Gives the first of the ``chosen`` tensors in the folder another value."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if name := next(filter(chosen, tensors), None):
            save_file(tensors | {name: value}, file, {"format": "pt"})
            return


def written(folder: Path, name: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


@pytest.mark.parametrize("family", sorted(ROTARY))
def test_a_config_written_for_all_readers_means_the_same_to_this_transformers(family: str, tmp_path: Path) -> None:
    """The older names are read as well where they are: they must not take the place of others."""
    save(tmp_path / "first", family, **SMALL, **deepcopy(ROTARY[family]))  # transformers changes what it is given
    model = load(tmp_path / "first")
    (tmp_path / "home").mkdir()
    model.save_config(tmp_path / "home", torch.bfloat16, {})
    found = written(tmp_path / "home")
    assert found["dtype"] == found["torch_dtype"] == "bfloat16"
    for key in ROTARY[family]:
        assert found[key] == ROTARY[family][key]
    config: Any = AutoConfig.from_pretrained(tmp_path / "home")
    assert config.rope_parameters == model.module.config.rope_parameters  # type: ignore[union-attr]
    assert config.dtype == torch.bfloat16


def test_the_stop_tokens_and_the_sampling_of_the_weights_that_a_run_begins_with_are_kept(tmp_path: Path) -> None:
    save(tmp_path / "first", **SMALL, eos_token_id=5)
    (tmp_path / "first/generation_config.json").write_text(json.dumps(STOPS))
    (tmp_path / "home").mkdir()
    load(tmp_path / "first").save_config(tmp_path / "home", torch.float32, {"eos_token_id": 9, "pad_token_id": 3})
    assert written(tmp_path / "home", "generation_config.json").items() >= (STOPS | {"pad_token_id": 3}).items()
    assert written(tmp_path / "home")["eos_token_id"] == 5
    how = GenerationConfig.from_pretrained(tmp_path / "home")
    assert (how.eos_token_id, how.top_p) == ([5, 7], 0.95)


@pytest.mark.parametrize("content", ["", "[1]", '{"eos_token_id": ', "[" * 100_000])
def test_a_generation_config_that_cannot_be_read_is_no_reason_not_to_train(content: str, tmp_path: Path) -> None:
    save(tmp_path / "first", **SMALL, eos_token_id=5)
    (tmp_path / "first/generation_config.json").write_text(content)
    (tmp_path / "home").mkdir()
    load(tmp_path / "first").save_config(tmp_path / "home", torch.float32, {})
    assert written(tmp_path / "home", "generation_config.json")["eos_token_id"] == 5


def test_from_the_beginning_the_special_tokens_are_the_tokenizers(tmp_path: Path) -> None:
    spec = plan_pb2.Run.Model(family="llama", config_json=json.dumps(SMALL))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    load_model(spec, TEXT).save_config(tmp_path, torch.float32, ids)
    assert written(tmp_path).items() >= ids.items()
    assert written(tmp_path, "generation_config.json") == ids


def test_a_token_that_also_means_the_end_is_padding_for_generation_alone(tmp_path: Path) -> None:
    """Whoever trains the model further would not learn it otherwise."""
    spec = plan_pb2.Run.Model(family="llama", config_json=json.dumps(SMALL))
    ids = {"eos_token_id": 2, "pad_token_id": 2}
    load_model(spec, TEXT).save_config(tmp_path, torch.float32, ids)
    assert written(tmp_path)["pad_token_id"] is None
    assert written(tmp_path, "generation_config.json") == ids
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert module.model.embed_tokens.padding_idx is None


def test_constants_go_home_and_are_what_the_next_run_begins_with(tmp_path: Path) -> None:
    """DeepSeek's routers have a buffer that its state dict has, and that no optimizer trains."""
    module = save(tmp_path / "first", "deepseek_v3", **DEEPSEEK)
    with torch.no_grad():
        for number, buffer in enumerate(module.buffers()):
            if buffer.shape == (4,):
                buffer.copy_(torch.arange(4) + number)
    module.save_pretrained(tmp_path / "first", max_shard_size="20KB")
    model = load(tmp_path / "first")
    constants = dict(model.constants)
    assert [name for name in constants if "e_score_correction_bias" not in name] == []
    assert len(constants) == 2
    for name, value in constants.items():
        assert torch.equal(value, module.state_dict()[name])
        assert value.any()


def test_constants_of_another_shape_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "first", "deepseek_v3", **DEEPSEEK)
    spoil(tmp_path / "first", lambda name: "e_score_correction_bias" in name, torch.zeros(5))
    with pytest.raises(ValueError, match=r"e_score_correction_bias has shape \[5\] there, but \[4\]"):
        load(tmp_path / "first")
