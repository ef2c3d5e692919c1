"""Whatever befalls a node, at whatever point of a step: training goes on, and trains what one process would."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.faults import (
    CLOCK_JUMP,
    COORDINATOR,
    CORRUPT_FRAME,
    PAUSE,
    RESET,
    SIGKILL,
    SLOW,
    Fault,
    Means,
    Phase,
    announcement,
    fail,
    pair_of_faults,
)
from tests.cluster.launch import Cluster, Event
from tests.cluster.runs import GPT2, run_file

NODES = ("a", "b", "c", "d")
STEP = 5
LEASE = 10.0
"""Never waited for: whatever breaks a connection is noticed at once."""
LEASE_OF_THE_SILENT = 1.5
"""Silence is noticed after a lease, and so is slowness."""
PAUSED = 2 * LEASE_OF_THE_SILENT


@pytest.mark.parametrize("means", [SIGKILL, PAUSE, RESET], ids=lambda means: means.value)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_one_replica_fails_and_comes_back(tmp_path: Path, phase: Phase, means: Means) -> None:
    fault = fail("b").at(step=STEP, phase=phase).by(means, seconds=PAUSED if means is PAUSE else 0.0)
    cluster = train_until_all_are_back(tmp_path, [fault])
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_two_nodes_fail_in_one_step_and_come_back(tmp_path: Path, seed: int) -> None:
    assert_exact(train_until_all_are_back(tmp_path, pair_of_faults(seed, NODES, STEP, pause=PAUSED)))


def test_a_corrupt_frame_is_refused_by_name_and_its_step_redone(tmp_path: Path) -> None:
    fault = fail("b").at(step=STEP, phase=Phase.FORWARD).by(CORRUPT_FRAME)
    with started(tmp_path, [fault]) as cluster:
        aborted = cluster.wait_for("step_aborted")
        assert (aborted["step"], aborted["problem"], aborted["node"]) == (STEP, "PEER_LOST", "b")
        assert "CORRUPT: " in aborted["reason"]
        cluster.wait_for("step_committed", where=lambda e: e["step"] == STEP + 3)
    assert cluster.of("node_left") == []
    assert_exact(cluster)


def test_a_clock_that_jumps_an_hour_changes_nothing(tmp_path: Path) -> None:
    faults = [
        fail("b").at(step=STEP, phase=Phase.FORWARD).by(CLOCK_JUMP),
        fail(COORDINATOR).at(step=STEP + 1, phase=Phase.VOTE).by(CLOCK_JUMP),
    ]
    with started(tmp_path, faults) as cluster:
        for fault in faults:
            await_fault(cluster, fault)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == STEP + 20)
    times = [e["time"] for e in cluster.log()]
    assert times[-1] - times[0] > 3600
    assert cluster.of("step_aborted") == []
    assert cluster.of("node_left") == []
    assert_exact(cluster)


def train_until_all_are_back(folder: Path, faults: Sequence[Fault]) -> Cluster:
    """Trains until all of ``faults`` have happened and every node takes part again, and two steps more."""
    with started(folder, faults) as cluster:
        for fault in faults:
            await_fault(cluster, fault)
        last = max(cluster.events.index(left_by(cluster, fault)) for fault in faults)
        whole = cluster.wait_for("plan_adopted", where=has_all, after=last)
        begun = cluster.wait_for("plan_started", where=lambda e: e["generation"] >= whole["generation"])
        cluster.wait_for("step_committed", where=lambda e: e["step"] == begun["step"] + 1, after=last)
    return cluster


def started(
    folder: Path,
    faults: Sequence[Fault],
    stages: Sequence[int] = (2, 2),
    nodes: Sequence[str] = NODES,
    alike: bool = True,
) -> Cluster:
    """As a context: a coordinator and its nodes, with more steps to train than there will be time for."""
    lease = LEASE_OF_THE_SILENT if any(fault.means in (PAUSE, SLOW) for fault in faults) else LEASE
    # Slow learning, lest rounding grow tenfold every twenty steps (it does at 1e-2).
    text = run_file(model=GPT2, stages=[*stages], steps=5000, learning_rate=1e-3, lease=lease)
    return Cluster(folder, text, faults=faults, nodes=nodes, alike=alike)


def await_fault(cluster: Cluster, fault: Fault) -> None:
    """Until ``fault`` has happened; a node that was killed is started again."""
    process = cluster.coordinator if fault.process == COORDINATOR else cluster.nodes[fault.process]
    assert process is not None
    process.wait_for_error(announcement(fault))
    if fault.means is SIGKILL:
        assert process.wait(10) == -signal.SIGKILL
        left_by(cluster, fault)
        cluster.add(fault.process)


def left_by(cluster: Cluster, fault: Fault) -> Event:
    return cluster.wait_for("node_left", where=lambda e: e["node"] == fault.process)


def has_all(event: Event) -> bool:
    return {node for stage in event["plan"]["stages"] for node in stage["replicas"]} == set(NODES)


def test_a_node_that_became_slow_gets_less_to_do(tmp_path: Path) -> None:
    # Already somewhat slow: else its steps are too short to be measured.
    slow = fail("b").at(step=1, phase=Phase.FORWARD).by(SLOW, seconds=0.02)
    slower = fail("b").at(step=10, phase=Phase.FORWARD).by(SLOW, seconds=0.1)
    with started(tmp_path, [slow, slower], stages=[2], nodes=("a", "b"), alike=False) as cluster:
        before = shares(cluster.wait_for("plan_adopted"))
        drifted = cluster.wait_for("device_drifted", timeout=100)
        assert (drifted["node"], "slower than before" in drifted["reason"]) == ("b", True)
        after = shares(cluster.wait_for("plan_adopted", where=lambda e: e["generation"] == 2))
        assert after.get("b", 0) < before["b"]
        started_over = len(cluster.events)
        cluster.wait_for("step_committed", after=started_over)
    assert cluster.of("step_aborted") == []
    assert_exact(cluster)


def shares(adopted: Event) -> dict[str, int]:
    """Micro-batches by node."""
    return {route["nodes"][0]: route["micro_batches"] for route in adopted["plan"]["routes"]}
