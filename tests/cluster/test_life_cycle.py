"""A run's life: `serve` starts it, ends, goes on by the same command, and nodes do what that asks of them by themselves."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import GPT2, losses_alone, run_file

STEPS = 40


@pytest.mark.soak
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGKILL],
)
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


def command(cluster: Cluster, *words: str) -> dict[str, Any]:
    """What an operator's command on this machine says."""
    said: list[bytes] = []
    line = [sys.executable, "-m", "dtfm.coordinator.cli", *words, cluster.address, "--json"]
    process = Process(line, cluster.folder, on_line=said.append)
    assert process.wait(30) == 0, process.errors
    return dict(json.loads(said[0]))


@pytest.mark.soak
def test_a_paused_run_stays_paused_over_a_crash_and_a_stopped_one_goes_on_after_its_last_step(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=STEPS), nodes="ab") as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 3)
        assert "paused the run" in command(cluster, "pause")["sentence"]
        at = len(cluster.of("step_committed"))
        waiting = cluster.wait_for("waiting", where=lambda e: "paused the run" in e["reason"])
        whole = cluster.wait_for("checkpoint_written")
        assert at <= whole["step"] <= at + 1, "the step in hand"
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(20)
        begun = len(cluster.events)
        cluster.start_coordinator()
        for name in "ab":
            cluster.wait_for("node_ready", where=lambda e, name=name: e["node"] == name, after=begun)  # type: ignore[misc]
        assert cluster.wait_for("waiting", after=begun)["reason"] in waiting["reason"]
        assert command(cluster, "continue")["sentence"] == "the run goes on"
        cluster.wait_for("step_committed", after=begun)
        assert command(cluster, "stop")["asked"] == "stop"
        assert cluster.finish() == 0
        assert {node.wait(20) for node in cluster.nodes.values()} == {0}
        stopped = cluster.of("run_stopped")[0]
        assert cluster.of("checkpoint_written")[-1]["step"] == stopped["step"]
        assert cluster.of("step_committed")[-1]["step"] == stopped["step"]

        cluster.start_coordinator()
        for name in "ab":
            cluster.add(name)
        cluster.wait_for("run_finished")
        assert cluster.finish() == 0
    assert not cluster.of("rolled_back")
    assert [e["step"] for e in cluster.log() if e["event"] == "step_committed"] == list(range(1, STEPS + 1))
    assert_exact(cluster)


@pytest.mark.soak
def test_after_the_end_the_coordinator_stays_and_sends_home_who_comes_back(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=4)
    with Cluster(tmp_path, text, start=False) as cluster:
        cluster.start_coordinator(exits=False)
        following = Process(
            [sys.executable, "-m", "dtfm.coordinator.cli", "events", cluster.address, "--follow"], tmp_path
        )
        for name in "ab":
            cluster.add(name)
        cluster.wait_for("run_finished")
        assert {node.wait(20) for node in cluster.nodes.values()} == {0}
        assert following.wait(20) == 0, "no event follows"
        assert cluster.add("a").wait(30) == 0
        assert cluster.coordinator is not None
        for again in (False, True):
            cluster.coordinator.send(signal.SIGINT)
            assert cluster.coordinator.wait(20) == 0
            cluster.start_coordinator(exits=again)
            assert cluster.add("b").wait(30) == 0 if not again else cluster.coordinator.wait(20) == 0
        assert len(cluster.of("step_committed")) == 4


@pytest.mark.soak
def test_a_run_gets_more_steps_while_it_goes_on_and_after_it_is_over(tmp_path: Path) -> None:
    """The learning rate is constant, so the losses equal those in a run that had this many steps from the start."""
    text = run_file(model=GPT2, stages=[1, 1], steps=10).replace(
        "warmup_steps", "final_learning_rate_fraction = 1.0\nwarmup_steps"
    )
    with Cluster(tmp_path, text, start=False) as cluster:
        cluster.start_coordinator(exits=False)
        for name in "ab":
            cluster.add(name)
        cluster.wait_for("step_committed")
        assert "set train.steps to 14; it was 10" in command(cluster, "set", "train.steps=14")["sentence"]
        assert cluster.wait_for("run_finished")["step"] == 14
        assert {node.wait(20) for node in cluster.nodes.values()} == {0}
        over = len(cluster.events)
        assert "set train.steps to 17; it was 14" in command(cluster, "set", "train.steps=17")["sentence"]
        for name in "ab":
            cluster.add(name)
        assert cluster.wait_for("run_finished", after=over)["step"] == 17
        assert {node.wait(20) for node in cluster.nodes.values()} == {0}
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.coordinator.wait(20) == 0
    assert [e["step"] for e in cluster.of("step_committed")] == list(range(1, 18))
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file, steps=17), rel=1e-9, abs=0)


def test_the_lease_gets_shorter_while_the_run_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=5000, lease=60), nodes="ab") as cluster:
        cluster.wait_for("step_committed")
        command(cluster, "pause")
        command(cluster, "set", "cluster.lease=2")
        cluster.nodes["a"].send(signal.SIGSTOP)
        left = cluster.wait_for("node_left")
        assert (left["node"], left["reason"]) == ("a", "no sign of life for 2 seconds"), "heartbeats alone keep b"
        assert "b" not in {e["node"] for e in cluster.of("node_left")}


def test_a_second_ctrl_c_waits_for_nobody(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1], steps=5000, lease=60), nodes="a") as cluster:
        cluster.wait_for("step_committed")
        cluster.nodes["a"].send(signal.SIGSTOP)  # it will not hang up
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        cluster.wait_for("coordinator_stopped")
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.coordinator.wait(20) == 130
