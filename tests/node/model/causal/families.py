"""Families of transformers as small models: what a run says of each, and how far its stages are from transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dtfm.node.data.samples import Sample
from dtfm.node.data.text.tokenizer import load_tokenizer
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.protos import plan_pb2
from tests.node.model.test_stage import LENGTH, VOCABULARY, stage_of, train
from tests.published import publish
from tests.tokenizer import make_metaspace_tokenizer

SAMPLE = Sample((LENGTH,), torch.int64, VOCABULARY)
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
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
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
TOWER = HEADS | {"vocab_size": VOCABULARY}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 8,
}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TOWER | {"model_type": "gemma3_text"}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "llama4": {
        "text_config": TOWER | {"model_type": "llama4_text", "intermediate_size_mlp": 48, "num_local_experts": 2},
        "vision_config": VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "qwen3_5": {
        "text_config": TOWER | LINEAR | {"model_type": "qwen3_5_text"},
        "vision_config": {
            "hidden_size": 16,
            "depth": 1,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 32,
        },
    },
    "mistral3": {
        "text_config": TOWER | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
    },
}
"""Models that also read images: of these the language model is trained."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model of this ``family``. ``what`` tells it from others of the family. ``refusal``: what the sentence with which a run
    refuses it says; empty: the run takes it."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.family}{self.what and f', {self.what}'}"

    def load(self, folder: Path) -> Model:
        """The model as nodes load it, from the beginning, or from files in ``folder``. Raises ValueError."""
        if self.family in TOWERS:
            saved_with_images(folder, self.family)
            return load_model(plan_pb2.Run.Model(pretrained=str(folder)), SAMPLE)
        spec = plan_pb2.Run.Model(family=self.family, config_json=json.dumps(self.config))
        return load_model(spec, SAMPLE)


class Published(Family):
    """A model with trained weights, as transformers saves it."""

    def load(self, folder: Path) -> Model:
        torch.manual_seed(3)
        config = AutoConfig.for_model(self.family, **({"vocab_size": VOCABULARY} | self.config))
        module: Any = AutoModelForCausalLM.from_config(config)
        module.save_pretrained(folder)
        return load_model(plan_pb2.Run.Model(pretrained=str(folder)), SAMPLE)


class LargerTokenizer(Family):
    """A published model whose tokenizer has more tokens than its weights know, as some Code Llama models have it."""

    def load(self, folder: Path) -> Model:
        publish(folder, self.family, **self.config)
        tokenizer = load_tokenizer(make_metaspace_tokenizer(folder, "def f(x): return x + 1"))
        return load_model(plan_pb2.Run.Model(pretrained=str(folder)), SAMPLE, tokenizer=tokenizer)


SEES = "is not causal: layer 1 sees the tokens that come after"
FAMILIES = (
    Family("llama", GROUPED),
    Family("mistral", GROUPED | {"sliding_window": 4}),
    Family("mixtral", GROUPED | {"num_local_experts": 4}),
    Family("ministral3", HEADS),
    Family("qwen2", GROUPED),
    Family("qwen3", HEADS),
    Family("qwen3_moe", EXPERTS | {"num_experts": 4, "head_dim": 16}),
    Family("qwen3_next", EXPERTS | LINEAR | {"num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 16}),
    Family("gemma", HEADS),
    Family("gemma2", HEADS | {"sliding_window": 4}),
    Family("gemma3_text", HEADS | {"sliding_window": 4}),
    Family("gpt2", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    Family("gpt_neox", SIZES),
    Family("gpt_oss", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "opt",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        },
    ),
    Family("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Family("phi", GROUPED),
    Family("phi3", GROUPED | {"pad_token_id": 0}),
    Family("olmo2", GROUPED),
    Family("granite", GROUPED),
    Family("stablelm", GROUPED),
    Family("starcoder2", GROUPED),
    Family("smollm3", GROUPED | {"pad_token_id": 0}),
    Family("cohere2", GROUPED),
    Family("deepseek_v3", DEEPSEEK),
    Family("glm4_moe", EXPERTS | {"n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 1}),
    Family("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    *(Family(family, what="with images") for family in TOWERS),
    Family("bert", SIZES | {"is_decoder": True}, what="is_decoder = true"),
    Family("bert", SIZES, SEES),
    Family("roberta", SIZES | {"pad_token_id": 1}, SEES),
    Family(
        "rwkv",
        {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
        "cannot be computed one layer at a time",
    ),
    Published("apertus", GROUPED, what="published"),
    Family("apertus", GROUPED, "is not set by the model's own initialisation"),
    Family(
        "jetmoe",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "intermediate_size": 48,
        },
        "cannot be cut into layers: its forward pass looks at the values of its own tensors",
    ),
    Family(
        "llama",
        GROUPED | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        'rope_type "dynamic" changes with the length of each text',
        'rope_type "dynamic"',
    ),
    LargerTokenizer(
        "llama",
        {"vocab_size": 100},
        "different tokens, but the weights know only 100",
        "a tokenizer larger than the model",
    ),
)


def saved_with_images(folder: Path, family: str) -> Any:
    """One of TOWERS with random weights, as transformers saves it."""
    torch.manual_seed(3)
    module: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **TOWERS[family]))
    module.save_pretrained(folder, max_shard_size="20KB")
    return module.eval()


def differences(family: Family, model: Model, folder: Path) -> tuple[float, float]:
    """How far two stages of the model are from transformers: of the loss, and of the gradients, as parts of each. ``folder`` is
    where the family was loaded."""
    tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    stages = [stage_of(model, *ends, dtype=torch.float32) for ends in ((0, 2), (2, len(model.layers)))]
    loss = train(stages, inputs, labels)
    found = dict[str, torch.Tensor]()
    for stage in stages:
        for bucket in stage.buckets.values():
            for name, gradient in bucket.views(bucket.gradients).items():
                found[name] = found[name] + gradient if name in found else gradient
    whole: Any
    if family.family in TOWERS:
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        inside = dict(whole.named_parameters(remove_duplicate=False))
        # Llama 4 has a whole language model inside, the others have what lies between its embedding and its head.
        names = {name: (f"language_model.{name}", name.replace("model.", "model.language_model.", 1)) for name in found}
        parameters = {name: next(inside[each] for each in names[name] if each in inside) for name in found}
    elif (folder / "config.json").exists():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        parameters = {name: whole.get_parameter(name) for name in found}
    else:
        whole = AutoModelForCausalLM.from_config(model.module.config)
        parameters = {name: whole.get_parameter(name) for name in found}
        values = {name: value for each in model.buckets for name, value in model.initial_parameters(each, 5).items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
    whole.eval()
    expected = cross_entropy(whole(input_ids=inputs).logits.flatten(0, 1).float(), labels.flatten())
    torch.autograd.backward(expected)
    apart, size = 0.0, 0.0
    for name, parameter in parameters.items():
        right = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        apart += float((found[name] - right).square().sum())
        size += float(right.square().sum())
    return abs(loss - expected.item()) / expected.item(), (apart / size) ** 0.5
