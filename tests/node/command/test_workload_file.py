"""`dtfm-node workload`: from a run file to WORKLOAD.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from dtfm.node.cli import app
from tests.tokenizer import make_tokenizer

SMALL = """
[model]
config = { hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 4, intermediate_size = 64 }
[data]
sequence_length = 32
[train]
micro_batch = 2
global_batch = 8
precision = "bf16"
"""


def test_pretrained_weights_say_what_the_model_is(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model", "some text to learn tokens from")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
    config = AutoConfig.for_model("gpt2", **sizes)
    module: Any = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(f"[model]\npretrained = '{tmp_path / 'model'}'\n[data]\nsequence_length = 16")
    printed = CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml")])
    assert printed.exit_code == 0, printed.output
    layers = json.loads(printed.stdout)["layers"]
    assert [layer["name"] for layer in layers] == ["embedding", "layer 1", "layer 2", "layer 3", "head"]
    assert layers[1]["activation_bytes"] == 4 * 16 * 32 * 2, "bf16, unless the run file says otherwise"


def test_it_prints_or_writes_what_each_layer_takes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL + 'activation_checkpointing = "layer"\n')
    printed = CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml")])
    assert printed.exit_code == 0, printed.output
    document = json.loads(printed.stdout)
    assert [layer["name"] for layer in document["layers"]] == ["embedding", "layer 1", "layer 2", "head"]
    layer = document["layers"][1]
    assert layer["activation_bytes"] == 2 * 2 * 32 * 32
    assert layer["kept_bytes"] > layer["activation_bytes"]
    assert (document["micro_batches"], document["tokens_per_micro_batch"]) == (4, 64)
    assert document["precision"] == "bf16"
    assert document["copy_bytes_per_parameter_byte"] == 0.5
    assert (document["checkpointing"], document["optimizer_state"]) == ("layer", "auto")
    output = tmp_path / "workload.json"
    assert CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml"), "--output", str(output)]).exit_code == 0
    assert json.loads(output.read_text()) == document


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[train]\nmicro_batch = 3", "train.global_batch = 32: must be a multiple of train.micro_batch (3)"),
        ("[", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    result = CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml")])
    assert result.exit_code == 2
    assert named in result.output
