"""A run can be resumed from its checkpoint, and its model can be exported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, held_out_loss, losses_alone, run_file


@pytest.mark.soak
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=60, checkpoint_every=10)
    with Cluster(tmp_path, text) as cluster:
        for name in "ab":
            cluster.add(name)
        cluster.wait_for("checkpoint_written", where=lambda e: e["step"] == 20)
        cluster.wait_for("step_committed", where=lambda e: e["step"] > 20 and e["step"] % 10 == 5)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        for node in cluster.nodes.values():  # nothing of the run is left in memory
            node.send(signal.SIGKILL)
        resumed = len(cluster.events)
        cluster.start_coordinator()
        for name in "ab":
            cluster.add(name)
        assert cluster.finish() == 0
        rolled = cluster.wait_for("rolled_back", after=resumed)
        assert rolled["step"] >= 20
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert len(kept) == 3
    assert kept[-1] == "step-00000060"
    # Steps between the checkpoint and the kill are trained twice, with the same loss.
    alone = losses_alone(cluster.run_file)
    for event in cluster.of("step_committed"):
        assert event["loss"] == pytest.approx(alone[event["step"] - 1], rel=1e-9, abs=0)
    assert {e["step"] for e in cluster.of("step_committed")} == set(range(1, 61))


def test_an_exported_model_loads_in_transformers_and_has_the_loss_of_the_run(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=4, checkpoint_every=2, precision="fp32")
    with Cluster(tmp_path, text) as cluster:
        cluster.add("a")
        cluster.add("b")
        assert cluster.finish() == 0
    export = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store, str(tmp_path / "model")]
    subprocess.run(export, check=True, timeout=60)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = model.generate(torch.tensor([list(b"def ")]), max_new_tokens=8, do_sample=False)
    assert tokens.shape == (1, 12)
    evaluated = cluster.of("evaluated")[-1]
    assert evaluated["step"] == 4
    assert held_out_loss(cluster.run_file, model, evaluated["samples"]) == pytest.approx(evaluated["loss"], rel=1e-6)
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
