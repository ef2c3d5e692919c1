"""Two machines of four devices, with slow lines: a step takes as long as predicted, as the nodes of each share its line.

Seconds are compared with seconds, so nothing else may use the machine meanwhile.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster as Network, Node
from tests.bench.homes import are_ready
from tests.cluster.launch import Cluster
from tests.wan.cluster import NODE_COMMAND, PORT, SLOW_NODE_COMMAND
from tests.wan.test_unequal import OFF
from tests.wan.unequal import FASTEST, LEASE_SHARED, MBIT, PATIENCE_SECONDS, run_file
from tests.wan.wan import COORDINATOR, Wan

pytestmark = [pytest.mark.usefixtures("emulation"), pytest.mark.soak]
MACHINES, DEVICES, RATE = ("m0", "m1"), 4, 4 * MBIT
MICRO_BATCHES, WARM_UP, STEPS = 32, 2, 8


def machine_of(node: str) -> str:
    return node.partition("-")[0]


def test_nodes_of_a_machine_are_planned_with_the_line_that_they_share(tmp_path: Path) -> None:
    """With a line for each of its nodes, four on each machine would train together, in 2.1 times the seconds predicted."""
    away = 1 - np.eye(len(MACHINES))
    network = Network(tuple(Node(name, 1, 1, up=RATE, down=RATE) for name in MACHINES), 0.02 * away, RATE * away)
    nodes = [f"{machine}-{number}" for number in range(DEVICES) for machine in MACHINES]
    run = run_file(MICRO_BATCHES, LEASE_SHARED).replace("nodes = 8", f"nodes = {len(nodes)}")
    with Wan(network) as wan:

        def place(name: str, command: list[str]) -> list[str]:
            slow = (SLOW_NODE_COMMAND, str(FASTEST))
            words = [part for word in command for part in (slow if word == NODE_COMMAND else (word,))]
            return wan.inside(machine_of(name), command if name == COORDINATOR else words)

        address = f"{wan.address(COORDINATOR)}:{PORT}"
        with Cluster(tmp_path, run, address=address, place=place, alike=False, invited=True) as cluster:
            for number, name in enumerate(nodes):
                if number:  # on a line that is shared, one node's probes slow down another's
                    cluster.wait_for("waiting", where=are_ready(number), timeout=PATIENCE_SECONDS)
                cluster.add(name, environment={"XDG_STATE_HOME": str(tmp_path / f"state-{machine_of(name)}")})
            cluster.wait_for("step_committed", where=lambda e: e["step"] == STEPS, timeout=PATIENCE_SECONDS)
            (adopted,) = cluster.of("plan_adopted")
            ways = {
                (link["source"], link["destination"]): link["way"]
                for event in cluster.of("links_measured")
                for link in event["links"]
                if link["way"]
            }
            took = [event["seconds"] for event in cluster.of("step_committed")][WARM_UP:]
    assert {way for (a, b), way in ways.items() if machine_of(a) == machine_of(b)} == {"loopback"}
    assert {way for (a, b), way in ways.items() if machine_of(a) != machine_of(b)} == {"lan"}
    assert 1 / OFF < statistics.median(took) / adopted["predicted_seconds"] < OFF
