"""`dtfm-node workload`: from a run file to WORKLOAD.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from dtfm.node.cli import app
from dtfm.node.command import workload_file
from dtfm.node.command.workload_file import DEFAULTS, read_run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.protos.run_file.tables import DEFAULT_LLAMA, Data, Model, Network, Table, Train
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        SMALL,
        '[model]\nfamily = "gpt2"\n[network]\ncompression = "off"\nreduction = "topk"',
        '[network]\ncompression = "raw16"\n[train]\nprecision = "fp64"',
        '[model]\npretrained = "some/name@main"',
        '[model]\npretrained = "/a/folder"\nfamily = "gpt2"\n[data]\ntokenizer = "bytes"',
        '[model]\nfamily = "module"\nmodule = "a.b:c"\n[data]\nsource = "module:a.b:d"',
    ],
)
def test_it_reads_what_the_coordinator_reads(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    mine, run = read_run(path), read_run_file(path).message("any")
    assert mine.model == run.model
    for key in ("source", "tokenizer", "sequence_length"):
        assert getattr(mine.data, key) == getattr(run.data, key)
    for key in ("micro_batch", "global_batch", "precision", "activation_checkpointing", "optimizer_state"):
        assert getattr(mine.train, key) == getattr(run.train, key)
    assert mine.network.reduction == run.network.reduction


def test_its_keys_and_their_defaults_are_the_coordinators() -> None:
    tables: dict[str, type[Table]] = {"model": Model, "data": Data, "train": Train, "network": Network}
    assert DEFAULTS.keys() == tables.keys()
    assert DEFAULTS["model"].keys() == Model.model_fields.keys()
    for name, defaults in DEFAULTS.items():
        for key, default in defaults.items():
            field = tables[name].model_fields[key]
            if field.default_factory is None:  # otherwise it follows from other keys, as the test above reads it
                assert default == field.default, (name, key)
    assert workload_file.DEFAULT_LLAMA == DEFAULT_LLAMA


def test_pretrained_weights_say_what_the_model_is(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model", "some text to learn tokens from")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
    config = AutoConfig.for_model("gpt2", **sizes)
    module: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    module.save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(f"[model]\npretrained = '{tmp_path / 'model'}'\n[data]\nsequence_length = 16")
    printed = CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml")])
    assert printed.exit_code == 0, printed.output
    layers = json.loads(printed.stdout)["layers"]
    assert [layer["name"] for layer in layers] == ["embedding", "layer 1", "layer 2", "layer 3", "head"]
    assert layers[1]["activation_bytes"] == 4 * 16 * 32 * 4


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
    assert (document["copy_bytes_per_parameter_byte"], document["optimizer_bytes_per_parameter_byte"]) == (0.5, 2)
    assert (document["checkpointing"], document["optimizer_state"]) == ("layer", "auto")
    output = tmp_path / "workload.json"
    assert CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml"), "--output", str(output)]).exit_code == 0
    assert json.loads(output.read_text()) == document


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[train]\nmicro_batch = 3", "train.global_batch is 32; it must be a multiple of train.micro_batch, 3"),
        ('[train]\nprecision = "int8"', "train.precision is 'int8'; it must be one of fp32, bf16, fp64"),
        ('[data]\nsequence_length = "long"', "data.sequence_length is 'long'; it must be a whole number"),
        ("model = 3", "model is 3; it must be a table"),
        ("[", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    result = CliRunner().invoke(app, ["workload", str(tmp_path / "run.toml")])
    assert result.exit_code == 2
    assert named in result.output
