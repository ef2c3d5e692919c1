"""A run that names no storage keeps its state on the nodes' own disks, and its weights arrive on the coordinator's disk: no two
machines share a disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.faults import HOLD, Phase, announcement, fail
from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import GPT2, held_out_loss, losses_alone, run_file

HOME = {
    "README.md",
    "config.json",
    "manifest.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""What lies beside the buckets of a checkpoint with the weights alone, of a run on bytes."""


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "dtfm-runs/test").glob("step-*"))


def without_storage(steps: int, every: int = 0, precision: str = "fp64") -> str:
    """The run file's default."""
    return run_file(
        model=GPT2,
        stages=[1, 1],
        steps=steps,
        checkpoint_every=every,
        precision=precision,
        storage="coordinator:",
    )


def test_the_weights_come_to_the_coordinators_disk_and_load_in_transformers(tmp_path: Path) -> None:
    """In a folder whose name a URL would encode."""
    tmp_path /= "José's-runs-at-100%"  # DTFM_ALLOW_DATA names several places with spaces between them
    tmp_path.mkdir()
    with Cluster(tmp_path, without_storage(steps=6, every=2, precision="fp32"), nodes="ab", invited=True) as cluster:
        assert cluster.finish() == 0
    home = tmp_path / "dtfm-runs/test/step-00000006"
    assert steps_in(tmp_path)[-1] == home.name
    files = {"bucket" if path.name.startswith("bucket-") else path.name for path in home.iterdir()}
    assert files == {*HOME, "bucket"}
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store]
    subprocess.run([*command, str(tmp_path / "model")], check=True, timeout=60)
    evaluated = cluster.of("evaluated")[-1]
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in home.glob("bucket-*")) == pytest.approx(size, rel=0.1), "weights alone"
    for folder in (home, tmp_path / "model"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        loss = held_out_loss(cluster.run_file, model, evaluated["samples"])
        assert loss == pytest.approx(evaluated["loss"], rel=1e-6)
        assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
        tokens = model.generate(torch.tensor([list(b"def ")]), max_new_tokens=8, do_sample=False)
        assert tokens.shape == (1, 12)


@pytest.mark.soak
@pytest.mark.parametrize("holds", ["weights", "state"])
def test_after_all_nodes_have_died_the_run_goes_on_from_their_disks_or_from_the_coordinators(
    tmp_path: Path, holds: str
) -> None:
    """With ``state`` the nodes' disks are lost as well. The nodes train five steps beyond the checkpoint and wait there until
    the checkpoint is on the coordinator's disk."""
    text = f'{without_storage(steps=30, every=10)}holds = "{holds}"\n'
    beyond = fail("a").at(step=16, phase=Phase.FORWARD).by(HOLD)
    with Cluster(tmp_path, text, nodes="ab", invited=True, faults=[beyond]) as cluster:
        cluster.wait_for("checkpoint_written", where=lambda e: e["step"] == 10)
        cluster.nodes["a"].wait_for_error(announcement(beyond))
        for node in cluster.nodes.values():  # nothing of the run is left in memory
            node.send(signal.SIGKILL)
        for node in cluster.nodes.values():
            node.wait(10)
        before = len(cluster.events)
        for name in "ab":
            empty = {"XDG_CACHE_HOME": str(tmp_path / f"new-{name}")}
            cluster.add(name, environment=empty if holds == "state" else None)
        rolled = cluster.wait_for("rolled_back", after=before)
        assert rolled["step"] == 10
        assert ("from the disks' snapshot" in rolled["reason"]) == (holds == "weights")
        assert cluster.finish() == 0
    alone = losses_alone(cluster.run_file)
    for event in cluster.of("step_committed"):
        assert event["loss"] == pytest.approx(alone[event["step"] - 1], rel=1e-9)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_the_weights_of_a_run_that_goes_on_are_exported_on_a_machine_without_the_coordinators_disk(
    tmp_path: Path,
) -> None:
    """There the folder of the run's weights is an empty one, as in a mount namespace of its own."""
    (tmp_path / "nothing").mkdir()
    mount = f"mount --bind {tmp_path}/nothing {tmp_path}/dtfm-runs && exec "
    with Cluster(tmp_path, without_storage(steps=5000), nodes="ab") as cluster:
        step = cluster.wait_for("step_committed", where=lambda e: e["step"] > 2)["step"]
        command = f"{sys.executable} -m dtfm.coordinator.cli export {tmp_path}/model {cluster.address} --json"
        told: list[bytes] = []
        export = Process(["unshare", "--mount", "sh", "-c", mount + command], tmp_path, on_line=told.append)
        assert export.wait(60) == 0, export.errors
        assert cluster.coordinator is not None
        assert cluster.coordinator.running.poll() is None
        of = json.loads(told[0])["step"]
    assert of > step
    assert cluster.of("checkpoint_written")[-1]["step"] == of
    folders = (tmp_path / "model", tmp_path / f"dtfm-runs/test/step-{of:08d}")
    model, kept = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(model[name], kept[name]) for name in kept)


@pytest.mark.soak
def test_a_coordinator_that_dies_while_it_gets_the_last_checkpoint_gets_it_once_it_is_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, without_storage(steps=4), nodes="ab", invited=True) as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 4)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        cluster.start_coordinator()
        assert cluster.finish() == 0
    assert steps_in(tmp_path) == ["step-00000004"]


@pytest.mark.soak
def test_a_folder_with_the_name_of_a_checkpoint_is_whole_whenever_the_coordinator_ends(tmp_path: Path) -> None:
    """While a run trains, a node sends 100 kB a second at least: the model takes seconds."""
    text = run_file(
        model=GPT2.replace("n_embd = 32", "n_embd = 128"),
        stages=[1, 1],
        steps=100_000,
        checkpoint_every=5,
        precision="fp32",
        storage="coordinator:",
    )

    def half_of_one_is_there() -> set[str]:
        while True:
            cluster.wait_for("step_committed", after=len(cluster.events))
            found = {each.parent.name for each in (tmp_path / "dtfm-runs/test").glob("step-*.partial/bucket-*")}
            if found:
                return found

    with Cluster(tmp_path, text, nodes="ab", invited=True) as cluster:
        first = half_of_one_is_there()
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        assert first <= set(steps_in(tmp_path))
        cluster.start_coordinator()
        assert first.isdisjoint(half_of_one_is_there())
        cluster.coordinator.send(signal.SIGINT)
        cluster.coordinator.wait(20)
        left = steps_in(tmp_path)
        assert all((tmp_path / "dtfm-runs/test" / name / "manifest.json").exists() for name in left)
        assert not [name for name in left if name.endswith(".partial")]
