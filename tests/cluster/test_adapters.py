"""Adapters beside a published model, trained by real processes: as transformers and peft train them in one process, whatever
happens to the nodes. What comes home is read by peft."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dtfm.protos.weights_fingerprint import PIECE_BYTES
from tests.cluster.launch import Cluster
from tests.cluster.plain import plain_adapter
from tests.cluster.runs import held_out_loss, losses_alone, run_at, run_file
from tests.published import adapter_run, publish, publish_adapter
from tests.web import web

STEPS = 4


def run_of(
    folder: Path,
    stages: list[int],
    *,
    family: str = "gpt2",
    weights: str = "bf16",
    adapter: str = "rank = 4",
    **keys: Any,
) -> str:
    published = publish(folder / "published", family)
    return adapter_run(run_file(stages=stages, **keys), published, weights=weights, adapter=adapter)


def loaded(base: Path, adapter: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter))


def test_two_nodes_train_one_and_peft_reads_what_comes_home(tmp_path: Path) -> None:
    text = run_of(tmp_path, [1, 1], family="qwen3", steps=STEPS, precision="fp32", storage="coordinator:")
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        assert cluster.finish(timeout=500) == 0
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=0, abs=1e-6)
    target = tmp_path / "adapter"
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store, str(target)]
    subprocess.run(command, check=True, timeout=60)
    config = json.loads((target / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(tmp_path / "published"))
    alone = plain_adapter(run_at(cluster.run_file), STEPS)
    (home,) = (tmp_path / "dtfm-runs/test").glob("step-*")
    for folder in (target, home):
        model = loaded(tmp_path / "published", folder)
        found = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if ".lora_" in name}
        assert found.keys() == alone.keys()
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-5) for name, value in alone.items())
        last = cluster.of("evaluated")[-1]["loss"]
        assert held_out_loss(cluster.run_file, model, 8) == pytest.approx(last, abs=1e-6)
    assert not [path.name for path in target.iterdir() if path.name in ("config.json", "model.safetensors")]


def test_a_second_start_reads_no_frozen_weights_from_the_source(tmp_path: Path) -> None:
    """Each start reads the files' descriptions and a piece of each tensor, for the fingerprint. The second run is another one of
    the same model."""
    read = list[int]()
    with web(publish(tmp_path / "published")) as source:
        for folder in (tmp_path / "first", tmp_path / "second"):
            folder.mkdir()
            source.asked.clear()
            text = run_file(stages=[1], steps=1, precision="fp32")
            with Cluster(folder, adapter_run(text, source.address)) as cluster:
                node = cluster.add("a", environment={"XDG_CACHE_HOME": str(tmp_path / "cache")})
                assert cluster.finish(timeout=500) == 0
            read.append(len([file for file, begin, _ in source.asked if file == "model.safetensors" and begin > 8]))
    assert read == [60, 30]
    assert "read 30 frozen parameters of layers 0-4 (30 from this machine's cache)" in node.errors


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", 'train_also = ["embed_tokens", "model.norm"]'),
        ("gemma2", 'train_also = ["embed_tokens", "model.norm"]'),
        ("qwen3", "dora = true"),
    ],
)
@pytest.mark.parametrize("stages", [[1], [1, 1], [2]], ids=["1", "2", "x2"])
def test_what_else_is_trained_comes_home_too(tmp_path: Path, family: str, more: str, stages: list[int]) -> None:
    """Modules that are trained whole, and lengths of rows. gemma2's head is its embedding. peft and transformers read what comes
    home, also merged."""
    adapter = f"rank = 4\n{more}"
    keys: dict[str, Any] = {"family": family, "adapter": adapter, "precision": "fp32", "storage": "coordinator:"}
    with Cluster(tmp_path, run_of(tmp_path, stages, steps=STEPS, **keys), nodes="ab"[: sum(stages)]) as cluster:
        assert cluster.finish(timeout=500) == 0
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=0, abs=1e-6)
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store]
    subprocess.run([*command, str(tmp_path / "adapter")], check=True, timeout=60)
    subprocess.run([*command, "--merged", str(tmp_path / "merged")], check=True, timeout=60)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (loaded(tmp_path / "published", tmp_path / "adapter"), merged):
        last = cluster.of("evaluated")[-1]["loss"]
        assert held_out_loss(cluster.run_file, model, 8) == pytest.approx(last, abs=1e-6)


@pytest.mark.soak
def test_a_run_begins_with_a_published_adapter(tmp_path: Path) -> None:
    """It is named in place of the model, and everything else follows from it. The nodes read it from the coordinator."""
    base = publish(tmp_path / "published", "qwen3")
    adapter = publish_adapter(tmp_path / "adapter", base, r=8, use_rslora=True, target_modules=["q_proj", "up_proj"])
    text = run_file(stages=[1, 1], steps=2, precision="fp32")
    with Cluster(tmp_path, adapter_run(text, adapter, adapter=""), nodes="ab") as cluster:
        assert cluster.finish(timeout=500) == 0
    begun_from = f'pretrained = "{adapter}"\nrank = 8\nalpha = 8.0\nrs = true\ntargets = ["q_proj", "up_proj"]'
    said = tmp_path / "said.toml"
    said.write_text(adapter_run(text, base, adapter=begun_from))
    assert cluster.losses == pytest.approx(losses_alone(said), rel=0, abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("stages", [[1], [1, 1, 1], [2, 2], [1] * 5], ids=["1", "3", "2x2", "5"])
def test_any_number_of_nodes_trains_the_same(tmp_path: Path, family: str, stages: list[int]) -> None:
    text = run_of(tmp_path, stages, family=family, steps=STEPS, precision="fp32")
    with Cluster(tmp_path, text, nodes="abcde"[: sum(stages)]) as cluster:
        assert cluster.finish(timeout=500) == 0
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=0, abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_so_do_nodes_that_keep_the_frozen_weights_in_few_bits(tmp_path: Path, weights: str) -> None:
    text = run_of(tmp_path, [1, 1], family="llama", weights=weights, steps=STEPS, precision="fp32")
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        assert cluster.finish(timeout=500) == 0
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=0, abs=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("adapter", ["rank = 4", "rank = 4\ndropout = 0.1"])
def test_a_node_is_killed_and_another_joins(tmp_path: Path, adapter: str) -> None:
    """The newcomer reads the frozen weights while the others train."""
    text = run_of(tmp_path, [2], adapter=adapter, steps=5000, learning_rate=1e-3)
    with Cluster(tmp_path, text, nodes=("stays", "dies")) as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        cluster.nodes["dies"].send(signal.SIGKILL)
        newcomer = cluster.add("newcomer")
        cluster.wait_for("plan_started", where=lambda e: e["generation"] == 3)
        newcomer.wait_for_error("buckets are taken over")
        started = len(cluster.events)
        cluster.wait_for("step_committed", after=started)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish(timeout=500) == 1
    assert newcomer.errors.index("frozen parameters of layers 0-4") < newcomer.errors.index("buckets are taken over")
    assert_same(cluster)
    assert sorted(cluster.of("plan_adopted")[-1]["plan"]["stages"][0]["replicas"]) == ["newcomer", "stays"]


@pytest.mark.soak
def test_a_newcomer_gets_frozen_weights_from_the_others(tmp_path: Path) -> None:
    """Their source still answers requests for descriptions and for pieces of tensors, but for no whole ones."""
    folder = publish(tmp_path / "published")
    with web(folder) as source:
        text = adapter_run(run_file(stages=[2], steps=5000, precision="fp32"), source.address)
        with Cluster(tmp_path, text, nodes=("stays", "dies")) as cluster:
            cluster.wait_for("step_committed", where=lambda e: e["step"] == 3)
            source.longest = PIECE_BYTES
            cluster.nodes["dies"].send(signal.SIGKILL)
            newcomer = cluster.add("newcomer", environment={"XDG_CACHE_HOME": str(tmp_path / "another machine")})
            cluster.wait_for("plan_started", where=lambda e: e["generation"] == 3, timeout=200)
            started = len(cluster.events)
            cluster.wait_for("step_committed", after=started)
            assert cluster.coordinator is not None
            cluster.coordinator.send(signal.SIGINT)
            assert cluster.finish(timeout=500) == 1
        assert "got the frozen weights of layer 1 from stays" in newcomer.errors
    cluster.run_file.write_text(text.replace(source.address, str(folder)))  # a plain process reads it from there
    committed = [e["loss"] for e in cluster.log() if e["event"] == "step_committed"]
    assert committed == pytest.approx(losses_alone(cluster.run_file, steps=len(committed)), rel=0, abs=1e-6)


@pytest.mark.soak
def test_the_coordinator_is_killed_and_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_of(tmp_path, [1, 1], steps=30), nodes="ab") as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(20)
        cluster.start_coordinator()
        assert cluster.finish(timeout=500) == 0
    assert_same(cluster)


def assert_same(cluster: Cluster) -> None:
    """Every committed step has one process's loss, and the log is right."""
    committed = [e for e in cluster.log() if e["event"] == "step_committed"]
    assert [e["step"] for e in committed] == list(range(1, len(committed) + 1))
    alone = losses_alone(cluster.run_file, steps=len(committed))
    assert [e["loss"] for e in committed] == pytest.approx(alone, rel=1e-8, abs=0)
    assert cluster.check().findings == ()
