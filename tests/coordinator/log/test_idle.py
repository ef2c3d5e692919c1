"""Why a plan does without a node, and what would help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.idle import idle_nodes
from dtfm.coordinator.log.ledger import Ledger
from dtfm.scheduler.model.plan import Plan, Stage
from dtfm.scheduler.model.workload import Layer, Workload


def ledger(loads: tuple[int, ...] = (8, 8), links: dict[str, float] | None = None, **device: Any) -> Ledger:
    """Nodes a and b train, and c does not. ``links``: bytes per second to and from a node; ``device``: c's."""
    rates = {"a": 1e8, "b": 1e8, "c": 1e8} | (links or {})
    found = ev.RunStarted("id", {"name": "r"}).apply(Ledger())
    for node in "abc":
        seen = ev.DeviceSeen("cuda", "a GPU", 24 << 30, 1e14, 32 << 30)
        joined = ev.NodeJoined(node, "", "10.0.0.1:1", replace(seen, **device) if node == "c" else seen)
        found = joined.apply(found)
    layers = tuple(Layer(f"layer {n}", 1e12, 1e9, 1e7) for n in range(4))
    found = ev.RunDescribed(ev.Described(Workload(layers, sum(loads)), "ab", 9, 9, 9.0, 9, 4)).apply(found)
    pairs = [(x, y) for x in "abc" for y in "abc" if x != y]
    for x, y in pairs:
        found = ev.LinksMeasured(x, (ev.Link(x, y, 0.01, min(rates[x], rates[y])),)).apply(found)
    for node in "abc":
        found = ev.NodeReady(node).apply(found)
    plan = Plan(1, (Stage((0, 4), ("a", "b"), loads),), (), ("c",))
    return ev.PlanAdopted(1, plan, "why", 0).apply(found)


def test_a_node_at_work_or_not_ready_is_not_idle() -> None:
    made = ledger()
    assert set(idle_nodes(made, "abc")) == {"c"}
    not_ready = made.with_member("c", replace(made.members["c"], ready=False))
    assert idle_nodes(not_ready, "abc") == {}
    assert idle_nodes(Ledger(), ()) == {}


@pytest.mark.parametrize(
    ("made", "why", "remedy"),
    [
        (ledger(memory_bytes=2 << 30), "its memory of 2.0 GiB holds no stage of this plan; the smallest needs", "more"),
        (ledger(links={"c": 1e6}), "its fastest link to the plan's nodes carries 8 Mbit/s; in the plan each", "800 Mbit/s"),
        (ledger(links={"c": 0.0}), "nothing passes between it and the nodes of the plan", "an open port"),
        (ledger(flops=1e13), "its device is 10.0 times slower than the slowest in the plan", "10.0 times as fast"),
        (ledger(loads=(1, 1)), "each node of the plan computes a single micro-batch", "a larger train.global_batch"),
        (ledger(), "the planner found no faster plan with it", "dtfm-coordinator plan"),
    ],
)  # fmt: skip
def test_the_outlier_is_named_with_a_remedy(made: Ledger, why: str, remedy: str) -> None:
    idle = idle_nodes(made, "c")["c"]
    assert idle.why.startswith(why)
    assert remedy in idle.remedy


def test_a_node_that_leaves_is_said_to() -> None:
    made = ev.NodeLeaving("c", "SIGTERM").apply(ledger())
    assert idle_nodes(made, "c")["c"].sentence == "it is leaving: SIGTERM"


def test_a_device_that_was_timed_beside_others_waits_for_a_quiet_machine() -> None:
    made = ledger(flops=1e14)
    timed = ev.DeviceTimed("c", 1e13, beside=True).apply(made)
    idle = idle_nodes(timed, "c")["c"]
    assert idle.why == "beside other programs its device was 10.0 times slower than the slowest in the plan"
    assert "quiet machine" in idle.remedy


def test_a_node_that_came_after_the_plan_is_told_when_the_planner_looks_again() -> None:
    made = ledger()
    plan = replace(made.training.in_force, idle=())
    later = replace(made, training=replace(made.training, plan=plan))
    assert idle_nodes(later, "c")["c"].why.startswith("it came after plan 1 was made")


def test_only_as_many_nodes_are_looked_at_as_are_wanted() -> None:
    assert idle_nodes(ledger(), "abc", 0) == {}
    assert set(idle_nodes(ledger(), "abc", 1)) == {"c"}
