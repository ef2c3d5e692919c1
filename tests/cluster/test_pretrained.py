"""Nodes begin with the weights of a folder that transformers wrote, each with its own layers' alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.node.model.causal.weight_files import WeightFiles
from tests.cluster.launch import Cluster
from tests.cluster.runs import losses_alone, run_file

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
NODES = "abc"


def train(folder: Path, pretrained: Path, **keys: Any) -> Cluster:
    folder.mkdir(exist_ok=True)
    model = f'[model]\npretrained = "{pretrained}"'
    text = run_file(model=model, stages=[1, 1, 1], precision="fp32", **keys)
    text = text.replace("[data]\n", '[data]\ntokenizer = "bytes"\n')
    with Cluster(folder, text, nodes=NODES) as cluster:
        assert cluster.finish() == 0
    return cluster


@pytest.mark.soak
def test_three_nodes_go_on_from_a_published_model_and_from_their_own_export(tmp_path: Path) -> None:
    torch.manual_seed(3)
    published = tmp_path / "published"
    config = AutoConfig.for_model("llama", vocab_size=256, **SIZES)
    module: Any = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(published, max_shard_size="40KB")
    files = WeightFiles(str(published))
    assert len({tensor.file for tensor in files.tensors.values()}) > 3

    first = train(tmp_path / "first", published, steps=3)
    # What one process makes of the model as transformers loads it.
    assert first.losses == pytest.approx(losses_alone(first.run_file), rel=1e-5, abs=0)
    read = {
        name: sum(map(int, re.findall(r"bucket \d+: read (\d+) bytes", node.errors)))
        for name, node in first.nodes.items()
    }
    assert all(read.values())
    assert sum(read.values()) == sum(tensor.end - tensor.begin for tensor in files.tensors.values())

    exported = tmp_path / "exported"
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", first.store, str(exported)]
    subprocess.run(command, check=True, timeout=60)
    again = train(tmp_path / "again", exported, steps=1, learning_rate=1e-30)
    assert again.of("evaluated")[-1]["loss"] == pytest.approx(first.of("evaluated")[-1]["loss"], rel=1e-6)


def test_a_new_run_begins_with_the_weights_of_another_which_nodes_get_from_the_coordinator(tmp_path: Path) -> None:
    """The nodes are other users', who allow none of its files."""
    text = run_file(stages=[1, 1], steps=3, precision="fp32", storage="coordinator:")
    with Cluster(tmp_path, text.replace('"test"', '"first"'), nodes="ab", invited=True) as first:
        assert first.finish() == 0
    (tmp_path / "store.db").unlink()
    text = run_file(
        model='[model]\npretrained = "dtfm-runs/first"',
        stages=[1, 1],
        steps=1,
        precision="fp32",
        learning_rate=1e-30,
        storage="coordinator:",
    )
    with Cluster(tmp_path, text, nodes="ab", invited=True) as second:
        assert second.finish() == 0
    assert second.of("evaluated")[-1]["loss"] == pytest.approx(first.of("evaluated")[-1]["loss"], rel=1e-6)
