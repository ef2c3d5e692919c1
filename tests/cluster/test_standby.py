"""Standbys: state is copied while the others train, so a newcomer does not make them wait, and a spare node replaces a stage's
last replica."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.faults import COORDINATOR, HOLD, LAG, Phase, announcement, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file


def stop_and_compare(cluster: Cluster) -> None:
    """Interrupts the run and compares its losses with a single process's."""
    assert cluster.coordinator is not None
    cluster.coordinator.send(signal.SIGINT)
    assert cluster.finish() == 1
    steps = [e["step"] for e in cluster.of("step_committed")]
    assert steps == list(range(1, len(steps) + 1))
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file, steps=len(steps)), rel=1e-8, abs=0)


def test_a_newcomer_has_its_state_before_the_others_pause_for_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, run_file(model=GPT2, stages=[2], steps=5000, learning_rate=1e-3)) as cluster:
        for name in ("stays", "dies"):
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        cluster.nodes["dies"].send(signal.SIGKILL)
        newcomer = cluster.add("newcomer")
        cluster.wait_for("plan_started", where=lambda e: e["generation"] == 3)
        newcomer.wait_for_error("6 of 6 buckets are taken over")
        started = len(cluster.events)
        cluster.wait_for("step_committed", after=started)
        stop_and_compare(cluster)
    adopted = cluster.of("plan_adopted")[-1]
    assert sorted(adopted["plan"]["stages"][0]["replicas"]) == ["newcomer", "stays"]


def test_a_spare_takes_over_the_stage_of_a_killed_node_and_no_step_is_lost(tmp_path: Path) -> None:
    """It dies when a commit is written and not announced, and the spare gets each step late. The lease is long, so that a commit
    waits for the spare even on a slow machine."""
    text = run_file(model=GPT2, stages=[1, 1], steps=5000, learning_rate=1e-3, lease=1000.0)
    beginning = [fail(name).at(step=2, phase=Phase.VOTE).by(HOLD) for name in "abc"]
    lags = [fail(name).at(step=18, phase=Phase.VOTE).by(LAG, seconds=0.3) for name in "abc"]
    commit = fail(COORDINATOR).at(step=20, phase=Phase.COMMIT).by(HOLD)
    text = text.replace("nodes = 2", "nodes = 3")
    with Cluster(tmp_path, text, nodes="abc", faults=[*beginning, *lags, commit]) as cluster:
        plan = cluster.wait_for("plan_adopted")["plan"]
        (spare,) = plan["idle"]
        cluster.nodes[spare].wait_for_error("standby: as of step 1")
        for hold in beginning:
            cluster.let_go(hold)
        assert cluster.coordinator is not None
        cluster.coordinator.wait_for_error(announcement(commit))
        cluster.nodes[plan["stages"][0]["replicas"][0]].send(signal.SIGKILL)
        cluster.let_go(commit)
        copied = cluster.wait_for("standby_promoted")
        assert ([copied["node"]], copied["layers"][0]) == (plan["idle"], 0)
        taken_over = len(cluster.events)
        cluster.wait_for("step_committed", after=taken_over)
        stop_and_compare(cluster)
    assert cluster.of("rolled_back") == []
