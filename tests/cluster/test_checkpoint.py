"""A run can be resumed from its checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.faults import HOLD, Phase, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file


@pytest.mark.soak
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """The nodes train five steps beyond each checkpoint, and wait there until it is written: the next may not come in between."""
    text = run_file(model=GPT2, stages=[1, 1], steps=60, checkpoint_every=10)
    beyond = {step: fail("a").at(step=step + 6, phase=Phase.FORWARD).by(HOLD) for step in range(10, 60, 10)}

    def written(step: int) -> None:
        cluster.wait_for("checkpoint_written", where=lambda e: e["step"] == step)

    with Cluster(tmp_path, text, nodes="ab", faults=[*beyond.values()]) as cluster:
        written(10)
        cluster.let_go(beyond[10])
        written(20)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 25)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        for node in cluster.nodes.values():  # nothing of the run is left in memory
            node.send(signal.SIGKILL)
        resumed = len(cluster.events)
        cluster.let_go(beyond[20])
        cluster.start_coordinator()
        for name in "ab":
            cluster.add(name)
        for step in (30, 40, 50):
            written(step)
            cluster.let_go(beyond[step])
        assert cluster.finish() == 0
        rolled = cluster.wait_for("rolled_back", after=resumed)
        assert rolled["step"] >= 20
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000040", "step-00000050", "step-00000060"]
    # Steps between the checkpoint and the kill are trained twice, with the same loss.
    alone = losses_alone(cluster.run_file)
    for event in cluster.of("step_committed"):
        assert event["loss"] == pytest.approx(alone[event["step"] - 1], rel=1e-9, abs=0)
    assert {e["step"] for e in cluster.of("step_committed")} == set(range(1, 61))
