"""One link between two nodes breaks without a word, while everybody else reaches both: the run goes on by itself. Nobody is
quarantined, no process ends, and the losses are those of an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster as Network, Node
from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster, Event
from tests.cluster.runs import GPT2, run_file
from tests.wan.cluster import wan_cluster
from tests.wan.wan import Wan

NAMES = ("a", "b", "c", "d")
RELAY = "r"
LATENCY, RATE = 0.001, 100e6 / 8
LEASE = 3.0
EXACT = 1e-9
LARGE_BYTES = 900
"""A packet of a handshake is smaller; one of a tensor is not."""
LEASES_OF_A_STALL = 6
"""From the fault to the next commit: gRPC notices after one lease or two; steps, plans and a busy machine take the rest."""

LEASES_TO_A_RELAY = 2
"""Half a lease for each way that is tried first, dialling and dial-back, and the measurement over the relay."""


def names_of(plan: Event) -> set[str]:
    return {name for stage in plan["plan"]["stages"] for name in stage["replicas"]}


def pair_in_use(plan: Event) -> tuple[str, str]:
    """Two nodes between which micro-batches go under the plan."""
    flow = next(flow for flows in plan["plan"]["flows"] for flow in flows)
    return flow["sender"], flow["receiver"]


@pytest.fixture
def wan(emulation: None) -> Iterator[Wan]:
    nodes = tuple(Node(name, 1e9, 1e9) for name in NAMES)
    with Wan(Network(nodes, np.full((4, 4), LATENCY), np.full((4, 4), RATE))) as wan:
        yield wan


def break_link(wan: Wan, fault: str, source: str, destination: str) -> None:
    for one, other in ((source, destination), (destination, source)):
        if fault == "cut both ways" or (fault == "cut one way" and one == source):
            wan.set_link(one, other, gbps=0.0)
        if fault == "large packets swallowed":
            wan.set_link(one, other, swallows_from=LARGE_BYTES)


def mend_link(wan: Wan, source: str, destination: str) -> None:
    for one, other in ((source, destination), (destination, source)):
        wan.set_link(one, other, gbps=RATE * 8 / 1e9, swallows_from=0)


def run_of(stages: list[int] | None, nodes: int) -> str:
    text = run_file(model=GPT2, stages=stages or [nodes], steps=5000, learning_rate=1e-3, lease=LEASE)
    return text if stages is not None else text.replace(f"stages = [{nodes}]", "")


def assert_nobody_went(cluster: Cluster) -> None:
    for kind in ("node_left", "node_quarantined", "run_failed", "rolled_back"):
        assert cluster.of(kind) == [], kind
    assert [name for name, process in cluster.nodes.items() if process.running.poll() is not None] == []


def stall_of(cluster: Cluster, fault: str, began: float, from_step: int) -> float:
    """Waits until steps are committed again, with another plan. Returns the seconds since the fault."""
    cluster.wait_for("step_committed", where=lambda e: e["step"] > from_step + 1)
    seconds = time.monotonic() - began
    print(f"{fault}: {seconds:.1f} s to the next commits, {seconds / LEASE:.1f} leases")
    return seconds


FAULTS = ("cut both ways", "cut one way", "large packets swallowed")
WHOLE = "keys of their own"


@pytest.mark.parametrize(
    ("fault", "who"),
    [
        pytest.param(fault, who, marks=() if (fault, who) == (FAULTS[0], WHOLE) else pytest.mark.soak)
        for fault in FAULTS
        for who in (WHOLE, "one key", "stages chosen freely")
    ],
)
def test_the_run_goes_on_without_a_link_that_breaks_between_two_nodes(
    wan: Wan, tmp_path: Path, fault: str, who: str
) -> None:
    stages = None if who == "stages chosen freely" else [2, 2]
    with wan_cluster(wan, tmp_path, run_of(stages, 4), invited=who == WHOLE) as cluster:
        for name in NAMES:
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= 4)
        plan = cluster.of("plan_adopted")[-1]
        pair = pair_in_use(plan) if plan["plan"]["flows"] else ("a", "b")
        break_link(wan, fault, *pair)
        begun, began, last = len(cluster.events), time.monotonic(), cluster.of("step_committed")[-1]["step"]
        broken = cluster.wait_for(
            "links_measured", where=lambda e: any(link["bandwidth"] == 0 for link in e["links"]), after=begun
        )
        seconds = stall_of(cluster, f"{fault}, {who}", began, last)
        assert {link["source"] for link in broken["links"]} == set(pair)
        assert_nobody_went(cluster)
    assert seconds < LEASES_OF_A_STALL * LEASE
    assert_exact(cluster, EXACT)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_two_nodes_alone_wait_say_which_link_would_help_and_try_it_again(wan: Wan, tmp_path: Path, fault: str) -> None:
    with wan_cluster(wan, tmp_path, run_of([1, 1], 2), invited=True) as cluster:
        for name in "ab":
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= 4)
        break_link(wan, fault, "a", "b")
        waiting = cluster.wait_for("waiting", where=lambda e: "link" in e["reason"], timeout=30)
        assert "a link that works would help between a and b" in waiting["reason"]
        cluster.wait_for(
            "links_measured",
            where=lambda e: any(link["problem"] for link in e["links"]),
            after=cluster.events.index(waiting),
        )
        mend_link(wan, "a", "b")
        last = cluster.of("step_committed")[-1]["step"]
        cluster.wait_for("step_committed", where=lambda e: e["step"] > last + 1)
        assert_nobody_went(cluster)
    assert_exact(cluster, EXACT)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_two_nodes_alone_go_on_over_a_relay_that_somebody_lends(tmp_path: Path, emulation: None, fault: str) -> None:
    names = (*"ab", RELAY)
    nodes = tuple(Node(name, 1e9, 1e9) for name in names)
    network = Network(nodes, np.full((3, 3), LATENCY), np.full((3, 3), RATE))
    with Wan(network) as wan, wan_cluster(wan, tmp_path, run_of([1, 1], 2), invited=True) as cluster:
        cluster.add_relay(RELAY)
        for name in "ab":
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= 4)
        break_link(wan, fault, "a", "b")
        began, last = time.monotonic(), cluster.of("step_committed")[-1]["step"]
        chosen = cluster.wait_for("ways_chosen", where=lambda e: any(way["relay"] == RELAY for way in e["ways"]))
        before = wan.traffic()["a", RELAY].packets
        seconds = stall_of(cluster, f"{fault}, with a relay", began, last)
        assert {(way["source"], way["destination"]) for way in chosen["ways"]} == {("a", "b"), ("b", "a")}
        assert wan.traffic()["a", RELAY].packets > before
        assert_nobody_went(cluster)
    assert seconds < (LEASES_OF_A_STALL + LEASES_TO_A_RELAY) * LEASE
    assert_exact(cluster, EXACT)
