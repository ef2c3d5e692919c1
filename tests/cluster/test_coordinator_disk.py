"""A run that names no storage keeps its checkpoints on the coordinator's disk, and nodes reach them there: no two machines share
a disk."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, held_out_loss, losses_alone, run_file


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


def test_the_state_comes_to_the_coordinators_disk_and_loads_in_transformers(tmp_path: Path) -> None:
    with Cluster(tmp_path, without_storage(steps=6, every=2, precision="fp32"), nodes="ab", invited=True) as cluster:
        assert cluster.finish() == 0
    assert steps_in(tmp_path)[-1] == "step-00000006"
    files = {path.name.split("-")[0] for path in (tmp_path / "dtfm-runs/test/step-00000006").iterdir()}
    assert files == {"bucket", "config.json", "manifest.json"}
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store]
    subprocess.run([*command, str(tmp_path / "model")], check=True, timeout=60)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    evaluated = cluster.of("evaluated")[-1]
    assert held_out_loss(cluster.run_file, model, evaluated["samples"]) == pytest.approx(evaluated["loss"], rel=1e-6)


def test_after_all_nodes_have_died_the_run_goes_on_from_there(tmp_path: Path) -> None:
    with Cluster(tmp_path, without_storage(steps=200, every=20), nodes="ab", invited=True) as cluster:
        cluster.wait_for("checkpoint_written", where=lambda e: e["step"] == 20)
        cluster.wait_for("step_committed", where=lambda e: e["step"] > 20 and e["step"] % 20 == 10)
        for node in cluster.nodes.values():  # nothing of the run is left in memory
            node.send(signal.SIGKILL)
        for node in cluster.nodes.values():
            node.wait(10)
        before = len(cluster.events)
        for name in "ab":
            cluster.add(name)
        assert cluster.wait_for("rolled_back", after=before)["step"] >= 20
        assert cluster.finish() == 0
    alone = losses_alone(cluster.run_file)
    for event in cluster.of("step_committed"):
        assert event["loss"] == pytest.approx(alone[event["step"] - 1], rel=1e-9)


def test_a_coordinator_that_dies_while_it_gets_the_last_checkpoint_gets_it_once_it_is_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, without_storage(steps=4), nodes="ab", invited=True) as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 4)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        cluster.start_coordinator()
        assert cluster.finish() == 0
    assert steps_in(tmp_path) == ["step-00000004"]
