"""What would put idle nodes to use, as `plan` says it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dtfm.coordinator.command.planning.idle_use import idle_uses, with_lines, with_memory
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.plan import Plan, Stage
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from tests.coordinator.command.typed import Typed
from tests.scheduler.dumps import dump_network, dump_workload

MB = 1e6
SEARCH = partial(schedule, evaluations=2_000)
WORK = Workload(tuple(Layer(f"layer {n}", 2e11, 40 * MB, 2 * MB) for n in range(6)), 8)


def cluster(slow: float = 0.5 * MB, memory: float = 8e9) -> Cluster:
    """Two nodes near each other, and a third with a ``slow`` line and this memory."""
    nodes = tuple(Node(name, 1e12, memory if name == "far" else 8e9) for name in ("a", "b", "far"))
    links = np.full((3, 3), 500 * MB)
    links[2, :] = links[:, 2] = slow
    return Cluster(nodes, np.full((3, 3), 0.001), links)


def test_a_node_behind_a_slow_line_is_used_with_a_faster_one() -> None:
    network = cluster()
    decision = SEARCH(network, WORK)
    assert decision.plan.idle == ("far",)
    (found,) = idle_uses(network, WORK, decision, SEARCH)
    assert found.nodes == ("far",)
    line = found.uses[0]
    assert line.what.startswith("its line at ")
    assert line.what.endswith(" instead of 4 Mbit/s")
    faster = SEARCH(with_lines(network, [2], line.times), WORK)
    assert "far" in faster.plan.nodes
    assert faster.predicted.iteration_seconds == line.seconds < decision.predicted.iteration_seconds
    assert str(found).startswith("Idle: far. What would put it to use: its line at ")
    assert not any(use.what.startswith("all lines") for use in found.uses), "it follows from its own"


def test_a_node_with_too_little_memory_is_used_with_more() -> None:
    network = cluster(slow=500 * MB, memory=100 * MB)
    decision = SEARCH(network, WORK)
    assert decision.plan.idle == ("far",)
    (found,) = idle_uses(network, WORK, decision, SEARCH)
    assert [use.what for use in found.uses if use.what.endswith("more memory")] == ["0.1 GiB more memory"]


def test_what_would_help_nobody_is_told_with_all_that_was_tried() -> None:
    network = cluster(slow=100.0)
    decision = SEARCH(network, WORK)
    (found,) = idle_uses(network, WORK, decision, SEARCH)
    assert found.uses == ()
    assert str(found).startswith("Idle: far. Nothing that was tried would put it to use: its line at 0.008 Mbit/s")
    assert idle_uses(network, WORK, decision, SEARCH, over=lambda: True) == []


def test_equal_nodes_that_change_places_are_no_use() -> None:
    network = cluster()
    decision = SEARCH(network, WORK)
    swapped = Plan(1, (Stage((0, 6), ("far",), (8,)),), (), ("a", "b"))
    (found,) = idle_uses(
        network,
        WORK,
        decision,
        lambda _cluster, work: replace(
            decision,
            plan=swapped,
            predicted=replace(
                decision.predicted,
                iteration_seconds=decision.predicted.iteration_seconds * work.micro_batches / WORK.micro_batches,
            ),
        ),
    )
    assert found.uses == ()


def test_a_link_carries_no_more_than_the_line_at_its_other_end() -> None:
    nodes = tuple(Node(name, 1e12, 8e9, up=10 * MB, down=10 * MB) for name in "ab")
    shared = Node("c", 1e12, 8e9, line="home")
    network = Cluster((*nodes, shared), np.zeros((3, 3)), np.full((3, 3), 5 * MB), (Line("home", 5 * MB, 5 * MB),))
    faster = with_lines(network, [2], 10)
    assert faster.bandwidth[2, 0] == faster.bandwidth[0, 2] == 10 * MB
    assert faster.bandwidth[0, 1] == 5 * MB
    assert faster.lines[0].up == 50 * MB
    assert with_memory(network, [2], 2).nodes[2].memory_bytes == 16e9
    assert with_memory(network, [2], 2).nodes[0].memory_bytes == 8e9


@pytest.mark.parametrize("as_json", [True, False])
def test_plan_says_it(tmp_path: Path, typed: Typed, as_json: bool) -> None:
    (tmp_path / "n.json").write_text(dump_network(cluster()))
    (tmp_path / "w.json").write_text(dump_workload(WORK))
    said = typed(
        "plan", "--network", str(tmp_path / "n.json"), "--workload", str(tmp_path / "w.json"), *(["--json"] * as_json)
    )
    if as_json:
        (found,) = json.loads(said)["idle_uses"]
        assert found["nodes"] == ["far"]
        assert found["uses"][0]["seconds"] > 0
    else:
        assert "\nIdle: far. What would put it to use: its line at " in said
