"""Nodes fail, each at an exact moment: training goes on and trains what one process would.

Each test puts one cluster through its faults one after the other, as most of the time would else go into starting clusters.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.faults import (
    CLOCK_JUMP,
    COORDINATOR,
    CORRUPT_FRAME,
    HOLD,
    LAG,
    OF_A_STEP,
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
from tests.cluster.launch import Cluster, Event, Process
from tests.cluster.runs import GPT2, run_file

NODES = ("a", "b", "c", "d")
STAGES = (2, 2)
STEP = 5
LEASE = 10.0
"""Nothing waits for it: a broken connection is noticed at once."""
SHORT_LEASE = 1.5
"""For faults that are noticed after a lease: a silent node, and a slow one."""
PAUSED = 2 * SHORT_LEASE
CHECKPOINT_EVERY = 10

Place = tuple[str, Phase]
"""Which node fails, and when."""

KILLED = list(zip(itertools.cycle(NODES), OF_A_STEP))[::2]
"""Every other phase: the soak has every node fail in each phase by each means."""


@pytest.mark.parametrize(
    ("means", "places"),
    [
        pytest.param(SIGKILL, KILLED, id="SIGKILL"),
        *(
            pytest.param(
                means, [(node, phase) for phase in OF_A_STEP], id=f"{means.value}-{node}", marks=pytest.mark.soak
            )
            for means in (SIGKILL, RESET, PAUSE)
            for node in NODES
        ),
    ],
)
def test_a_node_that_fails_within_a_step_comes_back_and_no_step_is_lost(
    tmp_path: Path, means: Means, places: Iterable[Place]
) -> None:
    with started(tmp_path, lease=SHORT_LEASE if means is PAUSE else LEASE) as cluster:
        cluster.wait_for("step_committed")
        for node, phase in places:
            seconds = PAUSED if means is PAUSE else 0.0
            endure(cluster, fail(node).at(step=last_step(cluster) + 2, phase=phase).by(means, seconds=seconds))
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_two_nodes_that_fail_in_one_step_come_back(tmp_path: Path) -> None:
    with started(tmp_path, lease=SHORT_LEASE) as cluster:
        cluster.wait_for("step_committed")
        for seed in range(12):
            endure(cluster, *pair_of_faults(seed, NODES, last_step(cluster) + 2, pause=PAUSED))
    assert_exact(cluster)


@pytest.mark.soak
@pytest.mark.parametrize("means", [SIGKILL, RESET], ids=lambda means: means.value)
def test_a_node_that_fails_while_the_plan_changes_for_another_comes_back(tmp_path: Path, means: Means) -> None:
    """It fails when it begins to take its place in the plan that the other one's return brought about."""
    with started(tmp_path) as cluster:
        for place in range(2):
            stages = plan_of_all(cluster)["stages"]
            victim, other = stages[place]["replicas"][0], stages[1 - place]["replicas"][0]
            begun = len(cluster.events)
            kill(cluster, other)
            cluster.wait_for("plan_started", after=begun)
            fault = fail(victim).at(step=0, phase=Phase.ADOPT).by(means)
            cluster.inject(fault)
            cluster.add(other)
            await_all(cluster, [await_fault(cluster, fault, begun)])
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_a_node_that_dies_while_it_joins_comes_back(tmp_path: Path) -> None:
    """It is killed three times: when it is let in, while it copies state, and when it begins to take its place in a plan."""
    with started(tmp_path) as cluster:
        node, donor = plan_of_all(cluster)["stages"][0]["replicas"]
        begun = len(cluster.events)
        kill(cluster, node)
        hold = fail(COORDINATOR).at(step=0, phase=Phase.JOIN).by(HOLD)
        cluster.inject(hold)
        cluster.add(node)
        process_of(cluster, hold).wait_for_error(announcement(hold))
        cluster.nodes[node].send(signal.SIGKILL)
        cluster.nodes[node].wait(10)
        cluster.let_go(hold)
        joined = cluster.wait_for("node_joined", after=begun)
        left = cluster.wait_for("node_left", after=cluster.events.index(joined))

        cluster.inject(fail(donor).at(step=0, phase=Phase.VOTE).by(LAG, seconds=1.0))
        cluster.add(node)
        cluster.wait_for("node_ready", after=cluster.events.index(left))
        kill(cluster, node)

        adopt = fail(node).at(step=0, phase=Phase.ADOPT).by(SIGKILL)
        cluster.inject(adopt)
        again = len(cluster.events)
        cluster.add(node)
        left = await_fault(cluster, adopt, again)
        meanwhile = cluster.events[begun : cluster.events.index(left)]
        assert not [e for e in meanwhile if e["event"] == "step_committed" and node in e["compute_seconds"]]
        await_all(cluster, [left])
    assert [e["node"] for e in cluster.events[begun:] if e["event"] == "node_joined"] == [node] * 4
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_a_node_that_dies_while_it_writes_a_snapshot_comes_back_and_later_ones_are_whole(tmp_path: Path) -> None:
    with started(tmp_path, checkpoint_every=CHECKPOINT_EVERY) as cluster:
        cluster.wait_for("checkpoint_written")
        for node in "adbcabcd":
            step = (last_step(cluster) // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
            endure(cluster, fail(node).at(step=step, phase=Phase.SNAPSHOT).by(SIGKILL))
            last = len(cluster.events)
            cluster.wait_for("checkpoint_written", where=lambda e, step=step: e["step"] > step, after=last)  # type: ignore[misc]
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


def test_a_corrupt_frame_is_refused_by_name_and_its_step_redone(tmp_path: Path) -> None:
    fault = fail("b").at(step=STEP, phase=Phase.FORWARD).by(CORRUPT_FRAME)
    with started(tmp_path, faults=[fault]) as cluster:
        aborted = cluster.wait_for("step_aborted")
        assert (aborted["step"], aborted["problem"], aborted["node"]) == (STEP, "PEER_LOST", "b")
        assert "MALFORMED: " in aborted["reason"]
        cluster.wait_for("step_committed", where=lambda e: e["step"] == STEP + 3)
    assert cluster.of("node_left") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_a_clock_that_jumps_an_hour_changes_nothing(tmp_path: Path) -> None:
    faults = [
        fail("b").at(step=STEP, phase=Phase.FORWARD).by(CLOCK_JUMP),
        fail(COORDINATOR).at(step=STEP + 1, phase=Phase.VOTE).by(CLOCK_JUMP),
    ]
    with started(tmp_path, faults=faults) as cluster:
        for fault in faults:
            process_of(cluster, fault).wait_for_error(announcement(fault))
        cluster.wait_for("step_committed", where=lambda e: e["step"] == STEP + 20)
    times = [e["time"] for e in cluster.log()]
    assert times[-1] - times[0] > 3600
    assert cluster.of("step_aborted") == []
    assert cluster.of("node_left") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_a_node_that_became_slow_gets_less_to_do(tmp_path: Path) -> None:
    # Somewhat slow from the start, as its steps would be too short to be measured otherwise.
    slow = fail("b").at(step=1, phase=Phase.FORWARD).by(SLOW, seconds=0.02)
    slower = fail("b").at(step=10, phase=Phase.FORWARD).by(SLOW, seconds=0.1)
    with started(tmp_path, faults=[slow, slower], stages=[2], nodes="ab", alike=False, lease=SHORT_LEASE) as cluster:
        before = shares(cluster.wait_for("plan_adopted"))
        # On a busy machine a may drift, too.
        slower_now = cluster.wait_for("device_drifted", where=is_slower, timeout=100)
        after = shares(cluster.wait_for("plan_adopted", after=cluster.events.index(slower_now)))
        assert after.get("b", 0) < before["b"]
        started_over = len(cluster.events)
        cluster.wait_for("step_committed", after=started_over)
    assert cluster.of("step_aborted") == []
    assert_exact(cluster)


def is_slower(drifted: Event) -> bool:
    return drifted["node"] == "b" and "slower than planned" in drifted["reason"]


def shares(adopted: Event) -> dict[str, int]:
    """Micro-batches by node."""
    stages = adopted["plan"]["stages"]
    return {
        node: load for stage in stages for node, load in zip(stage["replicas"], stage["loads"], strict=True) if load
    }


def started(
    folder: Path,
    *,
    faults: Sequence[Fault] = (),
    stages: Sequence[int] = STAGES,
    nodes: Sequence[str] = NODES,
    alike: bool = True,
    lease: float = LEASE,
    checkpoint_every: int = 0,
) -> Cluster:
    """As a context: a coordinator and its nodes, with more steps to train than a test has time for."""
    # The low learning rate keeps rounding errors small; at 1e-2 they would grow tenfold every twenty steps.
    text = run_file(
        model=GPT2,
        stages=[*stages],
        steps=5000,
        learning_rate=1e-3,
        lease=lease,
        checkpoint_every=checkpoint_every,
    )
    return Cluster(folder, text, faults=faults, nodes=nodes, alike=alike)


def last_step(cluster: Cluster) -> int:
    """The last step that was committed."""
    return int(cluster.of("step_committed")[-1]["step"])


def endure(cluster: Cluster, *faults: Fault) -> None:
    """Lets ``faults`` happen, and waits until every node has come back and trains again."""
    begun = len(cluster.events)
    for fault in faults:
        cluster.inject(fault)
    await_all(cluster, [await_fault(cluster, fault, begun) for fault in faults])


def process_of(cluster: Cluster, fault: Fault) -> Process:
    process = cluster.coordinator if fault.process == COORDINATOR else cluster.nodes[fault.process]
    assert process is not None
    return process


def await_fault(cluster: Cluster, fault: Fault, begun: int) -> Event:
    """Waits until ``fault`` has happened and the node has left, and starts it again if it was killed. Returns the event that
    it left, which is looked for from number ``begun`` on."""
    process = process_of(cluster, fault)
    process.wait_for_error(announcement(fault))
    if fault.means is SIGKILL:
        assert process.wait(10) == -signal.SIGKILL
    left = cluster.wait_for("node_left", where=lambda e: e["node"] == fault.process, after=begun)
    if fault.means is SIGKILL:
        cluster.add(fault.process)
    return left


def await_all(cluster: Cluster, left: Sequence[Event]) -> None:
    """Waits until all nodes are in a plan after the events ``left``, and have committed two steps of it."""
    after = max(cluster.events.index(event) for event in left)
    plan = cluster.wait_for("plan_adopted", where=has_all, after=after)
    begun = cluster.wait_for("plan_started", where=lambda e: e["generation"] >= plan["generation"], after=after)
    cluster.wait_for("step_committed", where=lambda e: e["step"] == begun["step"] + 1, after=after)


def plan_of_all(cluster: Cluster) -> Event:
    """The plan under which all nodes train, once there is one."""
    committed = cluster.wait_for(
        "step_committed", where=lambda e: len(e["compute_seconds"]) == len(NODES), after=max(0, len(cluster.events) - 1)
    )
    adopted = next(e for e in cluster.of("plan_adopted") if e["generation"] == committed["generation"])
    plan: Event = adopted["plan"]
    return plan


def kill(cluster: Cluster, node: str) -> None:
    """Kills ``node`` and waits until the coordinator has noticed."""
    begun = len(cluster.events)
    cluster.nodes[node].send(signal.SIGKILL)
    cluster.nodes[node].wait(10)
    cluster.wait_for("node_left", where=lambda e: e["node"] == node, after=begun)


def has_all(event: Event) -> bool:
    return {node for stage in event["plan"]["stages"] for node in stage["replicas"]} == set(NODES)
