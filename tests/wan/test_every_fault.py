"""Each fault at each moment of a run: the run goes on by itself. Nobody is quarantined, no process ends but the killed one, and
the losses are those of an undisturbed run. The seconds to the next commits are printed (pytest -s)."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster as Network, Node
from tests.cluster.exact import assert_exact
from tests.cluster.faults import HOLD, SLOW, Fault, Phase, announcement, fail
from tests.cluster.launch import Cluster, Event
from tests.cluster.runs import GPT2, run_file
from tests.cluster.test_islands import ROUNDS, assert_exact_islands, text as text_of_islands
from tests.wan.cluster import wan_cluster
from tests.wan.test_broken_pairs import FAULTS, break_link, mend_link
from tests.wan.wan import Wan

NAMES = ("a", "b", "c", "d")
ISLANDS = ("a1", "b1", "c1", "d1")
"""Each is an island alone."""
LATENCY, RATE = 0.001, 100e6 / 8
LEASE = 3.0
LEASES_OF_A_STALL = 6
"""From the fault to the next commits: two leases and three steps, plans, and a busy machine."""
SLOW_SECONDS = 1.0
"""Of each forward, which takes some hundredths of a second."""


class Means(enum.Enum):
    """What happens to the node, or to its link to another node of its plan."""

    CUT = FAULTS[0]
    CUT_ONE_WAY = FAULTS[1]
    SWALLOWS = FAULTS[2]
    HANG = "a node hangs"
    SLOW = "a node is slow"
    KILL = "a node is killed"
    STOP = "a node is stopped, and continued"


class Moment(enum.Enum):
    FIRST_STEP = Phase.FORWARD
    STEP = Phase.REDUCE
    SWITCH = Phase.ADOPT
    SNAPSHOT = Phase.SNAPSHOT
    EVALUATION = Phase.EVALUATE


@pytest.fixture(params=[NAMES])
def wan(emulation: None, request: pytest.FixtureRequest) -> Iterator[Wan]:
    nodes = tuple(Node(name, 1e9, 1e9) for name in request.param)
    with Wan(Network(nodes, np.full((4, 4), LATENCY), np.full((4, 4), RATE))) as wan:
        yield wan


def most_seconds(means: Means) -> float:
    """A slow node is waited for: up to four leases and three usual steps, and then it has to be planned for."""
    return LEASE * (LEASES_OF_A_STALL + (4 if means is Means.SLOW else 0))


def last_step(cluster: Cluster) -> int:
    return max((int(e["step"]) for e in cluster.of("step_committed")), default=0)


def await_all(cluster: Cluster, after: int) -> Event:
    """Waits until all four train; returns the plan."""
    committed = cluster.wait_for("step_committed", where=lambda e: len(e["compute_seconds"]) == 4, after=after)
    return next(e for e in cluster.of("plan_adopted") if e["generation"] == committed["generation"])["plan"]  # type: ignore[no-any-return]


def pair_of(plan: Event, node: str) -> tuple[str, str]:
    """The node, and one that it sends micro-batches to or gets them from; of an island alone: any other."""
    flows = [(flow["sender"], flow["receiver"]) for flows in plan["flows"] for flow in flows]
    others = [(node, other) for stage in plan["stages"] for other in stage["replicas"] if other != node]
    return next(pair for pair in (*flows, *others) if node in pair)


class Fated:
    """A ``node`` that a fault will hit, or its link to another, at ``phase`` of ``step`` or later."""

    def __init__(self, wan: Wan, cluster: Cluster, means: Means, node: str, step: int, phase: Phase) -> None:
        self.wan, self.cluster, self.means, self.node = wan, cluster, means, node
        victim = fail(node).at(step=step, phase=phase)
        slow = means is Means.SLOW
        self.fault: Fault = victim.by(SLOW, seconds=SLOW_SECONDS) if slow else victim.by(HOLD)
        self.begun, self.pair = len(cluster.events), ("", "")
        cluster.inject(self.fault)

    def strike(self) -> None:
        """Waits for the moment; then the fault happens."""
        cluster = self.cluster
        cluster.nodes[self.node].wait_for_error(announcement(self.fault), timeout=100)
        self.pair = pair_of(cluster.of("plan_adopted")[-1]["plan"], self.node)
        self.began, self.last, self.begun = time.monotonic(), last_step(cluster), len(cluster.events)
        match self.means:
            case Means.CUT | Means.CUT_ONE_WAY | Means.SWALLOWS:
                break_link(self.wan, self.means.value, *self.pair)
                cluster.let_go(self.fault)
            case Means.KILL:
                cluster.nodes[self.node].send(signal.SIGKILL)
                cluster.nodes[self.node].wait(10)
            case Means.STOP:
                cluster.nodes[self.node].send(signal.SIGSTOP)
                cluster.let_go(self.fault)

    def seconds(self) -> float:
        """Until two more steps are committed."""
        self.cluster.wait_for("step_committed", where=lambda e: e["step"] > self.last + 1, after=self.begun)
        return time.monotonic() - self.began

    def mend(self) -> None:
        cluster, mended = self.cluster, len(self.cluster.events)
        match self.means:
            case Means.CUT | Means.CUT_ONE_WAY | Means.SWALLOWS:
                mend_link(self.wan, *self.pair)
                cluster.wait_for("links_measured", where=self._works, after=mended, timeout=120)
            case Means.HANG:
                cluster.let_go(self.fault)
            case Means.SLOW:
                cluster.nodes[self.node].send(signal.SIGKILL)
                cluster.nodes[self.node].wait(10)
                cluster.add(self.node)
            case Means.KILL:
                cluster.add(self.node)
            case Means.STOP:
                cluster.nodes[self.node].send(signal.SIGCONT)

    def _works(self, measured: Event) -> bool:
        return any(
            {link["source"], link["destination"]} == set(self.pair) and link["bandwidth"] > 0
            for link in measured["links"]
        )


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("means", Means, ids=lambda means: means.value)
def test_a_run_goes_on_by_itself_whatever_fails_at_whatever_moment(wan: Wan, tmp_path: Path, means: Means) -> None:
    text = run_file(model=GPT2, stages=[2, 2], steps=5000, learning_rate=1e-3, lease=LEASE, checkpoint_every=6)
    stalls: dict[str, float] = {}
    with wan_cluster(wan, tmp_path, text.replace("[train]\n", "[train]\nevaluate_every = 4\n"), faults=[]) as cluster:
        plan: Event | None = None
        for name in NAMES:
            if name != "b":
                cluster.add(name)
        for moment in Moment:
            soon = 0 if moment in (Moment.FIRST_STEP, Moment.SWITCH) else 2
            fated = Fated(wan, cluster, means, "b", last_step(cluster) + soon, moment.value)
            if moment is Moment.FIRST_STEP:
                cluster.add("b")
            if moment is Moment.SWITCH:
                assert plan is not None
                of_b = next(stage for stage in plan["stages"] if "b" in stage["replicas"])
                other = next(name for name in NAMES if name not in of_b["replicas"])
                cluster.nodes[other].send(signal.SIGKILL)
                cluster.nodes[other].wait(10)
            fated.strike()
            stalls[moment.name] = fated.seconds()
            print(f"{means.value}, {moment.name.lower()}: {stalls[moment.name]:.1f} s to the next commits")
            if moment is Moment.SWITCH:
                cluster.add(other)
            mended = len(cluster.events)
            fated.mend()
            plan = await_all(cluster, mended)
        assert [name for name, process in cluster.nodes.items() if process.running.poll() is not None] == []
    for kind in ("node_quarantined", "run_failed", "rolled_back"):
        assert cluster.of(kind) == [], kind
    assert_exact(cluster, 1e-9)
    assert max(stalls.values()) < most_seconds(means)


@pytest.mark.soak
@pytest.mark.parametrize("wan", [ISLANDS], indirect=True, ids=[""])
@pytest.mark.parametrize("means", Means, ids=lambda means: means.value)
def test_so_do_islands_in_an_exchange(wan: Wan, tmp_path: Path, means: Means) -> None:
    text = text_of_islands(60, nodes=ISLANDS).replace("lease = 5.0", f"lease = {LEASE}")
    with wan_cluster(wan, tmp_path, text, coordinator=("tests.cluster.drawn",), faults=[]) as cluster:
        fated = Fated(wan, cluster, means, "b1", 2 * (ROUNDS + 1), Phase.REDUCE)
        for name in ISLANDS:
            cluster.add(name)
        fated.strike()
        seconds = fated.seconds()
        print(f"{means.value}, exchange: {seconds:.1f} s to the next commits")
        fated.mend()
        assert cluster.finish(timeout=200) == 0
    for kind in ("node_quarantined", "run_failed", "rolled_back"):
        assert cluster.of(kind) == [], kind
    assert_exact_islands(cluster)
    assert seconds < most_seconds(means)
