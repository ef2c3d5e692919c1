"""Of a published model that also reads images, the language model is trained, and goes home as one of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.node.model.load import load_model
from dtfm.protos import plan_pb2
from tests.node.model.causal.families import SAMPLE, TOWER, TOWERS, saved_with_images
from tests.node.model.test_stage import VOCABULARY


@pytest.mark.parametrize("family", TOWERS)
def test_the_language_model_of_a_larger_one_is_trained_and_goes_home(family: str, tmp_path: Path) -> None:
    whole = saved_with_images(tmp_path / "first", family)
    model = load_model(plan_pb2.Run.Model(pretrained=str(tmp_path / "first")), SAMPLE)
    values = {name: value for bucket in model.buckets for name, value in model.initial_parameters(bucket, 1).items()}
    home = tmp_path / "home"
    home.mkdir()
    model.save_config(home, torch.float32, {})
    save_file(
        {name: value.contiguous() for name, value in (values | model.constants).items()},
        home / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((home / "config.json").read_text())
    assert config["model_type"] == AutoConfig.for_model(family, **TOWERS[family]).get_text_config().model_type
    exported: Any = AutoModelForCausalLM.from_pretrained(home).eval()
    ids = torch.randint(VOCABULARY, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_the_older_names_of_a_tower_are_read_as_well(tmp_path: Path) -> None:
    """Published files have "language_model.model.layers", later ones "model.language_model.layers"."""
    folder = tmp_path / "first"
    saved_with_images(folder, "gemma3")
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    forms = (("language_model.model.", ""), ("model.language_model.", ""))
    for to, _ in forms:
        renamed = {}
        for name, value in tensors.items():
            for each, _ in forms:
                if name.startswith(each):
                    renamed[to + name.removeprefix(each)] = value
                    break
            else:
                renamed[name] = value
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
        model = load_model(plan_pb2.Run.Model(pretrained=str(folder)), SAMPLE)
        (value,) = model.initial_parameters(model.buckets[-1], 1).values()
        assert torch.equal(value, next(v for n, v in tensors.items() if n.endswith("embed_tokens.weight")))


def test_a_tower_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    saved_with_images(folder, "gemma3")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model.pretrained: .*model.layers.2.* are missing; copy the folder again"):
        load_model(plan_pb2.Run.Model(pretrained=str(folder)), SAMPLE)


@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3_moe", {"num_experts": 4}), ("glm4_moe", {"n_routed_experts": 4, "first_k_dense_replace": 1})],
)
def test_a_setting_that_the_familys_code_reads_is_taken(family: str, more: dict[str, Any]) -> None:
    """Its config does not list head_dim, which published models have."""
    given = TOWER | {"head_dim": 16, "moe_intermediate_size": 16, "num_experts_per_tok": 2} | more
    model = load_model(plan_pb2.Run.Model(family=family, config_json=json.dumps(given)), SAMPLE)
    assert dict(model.module.named_parameters())["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 32)
    with pytest.raises(ValueError, match=f"'{family}' has no setting 'head_dims'; leave it out"):
        load_model(plan_pb2.Run.Model(family=family, config_json=json.dumps(given | {"head_dims": 1})), SAMPLE)
