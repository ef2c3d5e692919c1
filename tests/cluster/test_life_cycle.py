"""A run's life: `serve` starts it, ends, goes on by the same command, and nodes do what that asks of them by themselves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file

STEPS = 40


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_nodes_come_back_and_no_step_is_trained_twice(tmp_path: Path, number: signal.Signals) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=STEPS)) as cluster:
        for name in "ab":
            cluster.add(name, "--give-up-after", "1")
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        assert cluster.coordinator is not None
        cluster.coordinator.send(number)
        assert cluster.coordinator.wait(20) == (1 if number != signal.SIGKILL else -number)
        if number != signal.SIGKILL:
            assert "Nodes keep what they have, and wait 60 minutes for it" in cluster.coordinator.errors
        for node in cluster.nodes.values():
            node.wait_for_error("giving up in 3600 s")
        cluster.start_coordinator()
        assert cluster.finish() == 0
        assert {node.wait(20) for node in cluster.nodes.values()} == {0}
    committed = [e for e in cluster.log() if e["event"] == "step_committed"]
    assert [e["step"] for e in committed] == list(range(1, STEPS + 1))
    assert [e["loss"] for e in committed] == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)


def test_a_second_ctrl_c_waits_for_nobody(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1], steps=5000, lease=60), nodes="a") as cluster:
        cluster.wait_for("step_committed")
        cluster.nodes["a"].send(signal.SIGSTOP)  # it will not hang up
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        cluster.wait_for("coordinator_stopped")
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.coordinator.wait(20) == 130
