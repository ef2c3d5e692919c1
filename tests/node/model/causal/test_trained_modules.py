"""Modules that are trained whole beside an adapter, as peft's `modules_to_save`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dtfm.node.data.samples import Sample
from dtfm.node.model.cost.layer_costs import layer_costs
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from tests.published import publish, publish_adapter

CPU = torch.device("cpu")
SAMPLE = Sample((12,), torch.int64, 256)
RUN = plan_pb2.Run(train=plan_pb2.Run.Train(micro_batch=2, precision=plan_pb2.FP32))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is its embedding."""
    return publish(tmp_path_factory.mktemp("gemma2"), "gemma2")


def model_of(
    folder: Path, *names: str, weights: str = "bf16", targets: tuple[str, ...] = (), pretrained: Path | str = ""
) -> Model:
    adapter = plan_pb2.Run.Adapter(rank=4, alpha=8, train_also=names, targets=targets, pretrained=str(pretrained))
    return load_model(plan_pb2.Run.Model(pretrained=str(folder), weights=weights, adapter=adapter), SAMPLE)


def whole_in(model: Model) -> dict[int, list[str]]:
    """By bucket, the parameters that are no adapter's."""
    named = {spec.index: [name for name, _ in spec.parameters if ".lora_" not in name] for spec in model.buckets}
    return {index: names for index, names in named.items() if names}


def test_they_are_in_their_layers_buckets_and_begin_as_published(llama: Path) -> None:
    model = model_of(llama, "embed_tokens", "lm_head", "model.norm")
    assert whole_in(model) == {0: ["model.embed_tokens.weight"], 4: ["model.norm.weight", "lm_head.weight"]}
    published = load_file(llama / "model.safetensors")
    for index, names in whole_in(model).items():
        values = model.initial_parameters(model.buckets[index], 7)
        assert all(torch.equal(values[name], published[name]) for name in names)
    assert not model.frozen.layer_bytes(0, torch.float32)
    stage = build_stage(model, 0, 5, CPU, torch.float32)
    trained = {name for bucket in stage.buckets.values() for name, _ in bucket.spec.parameters}
    module = {name for name, _ in model.module.named_parameters()}
    assert len(module) == len(trained) + len(model.frozen._held)


def test_names_are_peft_s(llama: Path) -> None:
    """They are the ends of whole names. What is in a decoder layer has no adapter then, and is not packed."""
    norms = ["model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"]
    assert whole_in(model_of(llama, "norm"))[1] == norms
    assert whole_in(model_of(llama, "model.norm")) == {4: ["model.norm.weight"]}
    model = model_of(llama, "mlp", "layers.1.self_attn", weights="nf4")
    of_layer = [name for name, _ in model.buckets[1].parameters]
    assert [name for name in of_layer if ".lora_" not in name] == [
        f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    ]
    assert not any(".mlp." in name and ".lora_" in name for name in of_layer)
    assert not any(".self_attn." in name and ".lora_" in name for name, _ in model.buckets[2].parameters)
    packed = model.frozen._packing._packs  # type: ignore[attr-defined]
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in packed
    assert not any(".mlp." in name for name in packed)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_head_that_is_the_embedding_is_one_parameter(
    gemma: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = model_of(gemma, name)
    shared = model.buckets[-1]
    assert shared.layers == (0, 4)
    assert [each for each, _ in shared.parameters] == ["model.embed_tokens.weight"]
    assert shared.further_names == ("lm_head.weight",)
    assert "model.embed_tokens and lm_head are one matrix in this model, and are trained as one" in caplog.text


@pytest.mark.parametrize(
    ("names", "targets", "sentence"),
    [
        (
            ["head2"],
            (),
            "adapter.train_also: no module with weights is called 'head2'; there are down_proj, embed_tokens, gate_proj, "
            "input_layernorm, k_proj, layers, lm_head, mlp, model, norm, o_proj, post_attention_layernorm, q_proj, self_attn, "
            "up_proj, v_proj",
        ),
        (["rotary_emb"], (), "adapter.train_also: no module with weights is called 'rotary_emb'; there are"),
        (["_proj"], (), "adapter.train_also: _proj also ends the name of a list, or of a matrix with an adapter ("),
        (["attn"], (), "adapter.train_also: model.layers.0.self_attn has an adapter, so that it is not trained whole"),
        (["layers"], (), "adapter.targets: "),
        (["q_proj"], ("q_proj",), "adapter.targets: "),
    ],
)
def test_what_cannot_be_trained_is_refused(
    llama: Path, names: list[str], targets: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=r"^adapter") as refused:
        model_of(llama, *names, targets=targets)
    assert str(refused.value).startswith(sentence)


def test_peft_reads_a_whole_matrix_beside_a_packed_model_that_does_not_pack_it(llama: Path, tmp_path: Path) -> None:
    """As docs/fine-tuning.md says. Beside a packed one peft finds no place for it."""
    begun = publish_adapter(tmp_path / "begun", llama, modules_to_save=["down_proj"], target_modules=["q_proj"])
    packing = BitsAndBytesConfig(load_in_4bit=True)
    packed = AutoModelForCausalLM.from_pretrained(llama, quantization_config=packing, device_map="cpu")
    with pytest.raises(KeyError, match=r"mlp.down_proj.weight.absmax"):
        PeftModel.from_pretrained(packed, str(begun))
    packing = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "down_proj"])
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=packing, device_map="cpu")
    read = dict(PeftModel.from_pretrained(model, str(begun)).named_parameters())
    for name, value in load_file(begun / "adapter_model.safetensors").items():
        if "lora" not in name:
            of_peft = name.replace("down_proj.", "down_proj.modules_to_save.default.")
            assert torch.equal(read[of_peft].float(), value.float())


def test_the_planner_counts_their_gradients_and_moments(llama: Path) -> None:
    before, costs = layer_costs(model_of(llama), RUN), layer_costs(model_of(llama, "embed_tokens", "lm_head"), RUN)
    table = 256 * 32 * 4
    assert (costs[0].parameter_bytes, costs[0].frozen_bytes, costs[0].backward_flops) == (table, 0, 0)
    assert (costs[4].parameter_bytes, costs[4].frozen_bytes) == (table, before[4].frozen_bytes - table)
    assert costs[4].backward_flops == 2 * costs[4].forward_flops == 2 * before[4].backward_flops
    assert costs[4].kept_bytes > before[4].kept_bytes
    assert list(costs[1:4]) == list(before[1:4])


def test_a_run_begins_with_modules_that_peft_has_trained(llama: Path, gemma: Path, tmp_path: Path) -> None:
    for number, (folder, names, tied) in enumerate([(llama, ["lm_head", "norm"], False), (gemma, ["lm_head"], True)]):
        begun = publish_adapter(tmp_path / str(number), folder, modules_to_save=names, ensure_weight_tying=tied)
        stored = load_file(begun / "adapter_model.safetensors")
        for name in [name for name in stored if ".lora_" not in name]:
            stored[name] += 1
        save_file(stored, begun / "adapter_model.safetensors", {"format": "pt"})
        model = model_of(folder, *names, pretrained=begun)
        values = {name: value for spec in model.buckets for name, value in model.initial_parameters(spec, 7).items()}
        assert len(values) == len(stored) - tied
        for name, value in values.items():
            assert torch.equal(value, stored[f"base_model.model.{name.replace('.default.', '.')}"])


def test_modules_of_an_adapter_that_do_not_fit_are_told(llama: Path, gemma: Path, tmp_path: Path) -> None:
    begun = publish_adapter(tmp_path / "one", llama)
    with pytest.raises(ValueError, match=r"has no base_model.model.lm_head.weight, .*set adapter.train_also = \[\]"):
        model_of(llama, "lm_head", pretrained=begun)
    apart = publish_adapter(tmp_path / "two", gemma, modules_to_save=["embed_tokens"])
    with pytest.raises(
        ValueError, match=r"lm_head.weight: it trains one of two matrices that are one in this model; merge"
    ):
        model_of(gemma, "embed_tokens", pretrained=apart)
    both = publish_adapter(tmp_path / "three", gemma, modules_to_save=["embed_tokens", "lm_head"])
    stored = load_file(both / "adapter_model.safetensors")
    stored["base_model.model.lm_head.weight"] += 1
    save_file(stored, both / "adapter_model.safetensors", {"format": "pt"})
    model = model_of(gemma, "embed_tokens", pretrained=both)
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight differ, and in this model"):
        model.initial_parameters(model.buckets[-1], 7)
