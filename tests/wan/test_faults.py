"""Faults of the network: it cuts a node off, or a link becomes slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster as Network, Node
from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file
from tests.wan.cluster import wan_cluster
from tests.wan.wan import COORDINATOR, Wan

NAMES = ("a", "b", "c", "d")
LATENCY, RATE = 0.001, 100e6 / 8
SLOW_GBPS = 2e-3
LEASE = 1.5


@pytest.fixture
def wan(emulation: None) -> Iterator[Wan]:
    nodes = tuple(Node(name, 1e9, 1e9) for name in NAMES)
    with Wan(Network(nodes, np.full((4, 4), LATENCY), np.full((4, 4), RATE))) as wan:
        yield wan


def training(wan: Wan, folder: Path, lease: float) -> Cluster:
    """As a context: a run with more steps than a test has time for."""
    text = run_file(model=GPT2, stages=[2, 2], steps=5000, learning_rate=1e-3, lease=lease)
    return wan_cluster(wan, folder, text)


@pytest.mark.soak
def test_the_run_goes_on_without_a_node_that_is_cut_off_until_the_network_is_back(wan: Wan, tmp_path: Path) -> None:
    with training(wan, tmp_path, LEASE) as cluster:
        for name in NAMES:
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        set_links(wan, "b", 0.0)
        left = cluster.wait_for("node_left")
        assert left["node"] == "b"
        cluster.wait_for("step_committed", after=cluster.events.index(left))
        set_links(wan, "b", RATE * 8 / 1e9)
        cluster.wait_for(
            "step_committed", where=lambda e: "b" in e["compute_seconds"], after=cluster.events.index(left)
        )
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_no_node_is_given_up_when_a_link_becomes_slow(wan: Wan, tmp_path: Path) -> None:
    with training(wan, tmp_path, 10.0) as cluster:
        for name in NAMES:
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        for name in NAMES:
            if name != "b":
                wan.set_link("b", name, gbps=SLOW_GBPS)
        last = cluster.of("step_committed")[-1]["step"]
        cluster.wait_for("step_committed", where=lambda e: e["step"] == last + 3)
    assert cluster.of("node_left") == []
    assert_exact(cluster)


@pytest.mark.soak
def test_a_coordinator_that_is_cut_off_from_a_whole_stage_waits_for_it_and_no_step_is_lost(
    wan: Wan, tmp_path: Path
) -> None:
    """For far longer than a lease, and than training all of it again would take."""
    with training(wan, tmp_path, LEASE) as cluster:
        for name in NAMES:
            cluster.add(name)
        stage = cluster.wait_for("plan_adopted")["plan"]["stages"][0]["replicas"]
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 3)
        cut(wan, stage, 0.0)
        for name in stage:
            cluster.wait_for("node_left", where=lambda e, name=name: e["node"] == name)  # type: ignore[misc]
        began = len(cluster.events)
        with pytest.raises(AssertionError, match="nothing for 12 s"):
            cluster.wait_for("rolled_back", timeout=12)
        cut(wan, stage, RATE * 8 / 1e9)
        last = cluster.of("step_committed")[-1]["step"]
        cluster.wait_for("step_committed", after=began, where=lambda e: e["step"] == last + 2)
    assert cluster.of("rolled_back") == []
    assert_exact(cluster)


def cut(wan: Wan, nodes: Sequence[str], gbps: float) -> None:
    """Sets the rate between the coordinator and these nodes, in both directions; 0: nothing passes."""
    for node in nodes:
        wan.set_link(node, COORDINATOR, gbps=gbps)
        wan.set_link(COORDINATOR, node, gbps=gbps)


def set_links(wan: Wan, node: str, gbps: float) -> None:
    """Sets the rate of all of ``node``'s links, in both directions."""
    for other in (*NAMES, COORDINATOR):
        if other != node:
            wan.set_link(node, other, gbps=gbps)
            wan.set_link(other, node, gbps=gbps)
