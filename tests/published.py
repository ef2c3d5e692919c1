"""Small models of random weights, as transformers publishes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES | {"num_key_value_heads": 2},
    "qwen3": _SIZES | _HEADS,
    "gemma2": _SIZES | _HEADS | {"query_pre_attn_scalar": 8, "sliding_window": 16},  # its head is its embedding
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}


def publish(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """Writes a model of this family for 256 tokens into ``folder``."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **({"vocab_size": 256} | CONFIGS[family] | settings))
    module: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():  # as published, norms and biases have been trained
            parameter.add_(torch.randn_like(parameter) * 0.05)
    module.save_pretrained(folder)
    return folder


def publish_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """Writes an adapter of random numbers for the model in ``base`` into ``folder``, as peft does."""
    torch.manual_seed(4)
    module: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    known: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    config = LoraConfig(**(known | settings), task_type="CAUSAL_LM")
    get_peft_model(module, config).save_pretrained(str(folder))
    return folder


def adapter_run(text: str, pretrained: Path | str, *, weights: str = "bf16", adapter: str = "rank = 4") -> str:
    """The run file ``text`` with an adapter beside these weights. The text is read byte by byte."""
    model = f'[model]\npretrained = "{pretrained}"\nweights = "{weights}"\n[adapter]\n{adapter}\n'
    before, _, after = text.partition("[data]\n")
    return before.partition("[model]")[0] + model + '[data]\ntokenizer = "bytes"\n' + after
