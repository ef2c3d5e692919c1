"""The memory that a change of plan takes: `replan/switch.py`."""

from __future__ import annotations

import numpy as np
import pytest

from dtfm.scheduler.cost.state_transfer import Holdings
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Objective, Reason
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.replan.replan import Incumbent, decide
from dtfm.scheduler.replan.switch import short_of_memory

LAYERS = (Layer("", 1e9, 100.0, 1e-3),) * 6
HOSTED = Keeping(Checkpointing.NONE, OptimizerState.HOST)


def cluster(memory: float, host: float | None = None, flops: float = 1e9) -> Cluster:
    nodes = Node("a", 1e9, memory, host_memory_bytes=host), Node("b", flops, memory, host_memory_bytes=host)
    return Cluster(nodes, np.full((2, 2), 1e-3), np.full((2, 2), 1e6))


def plan(cut: int, keeping: tuple[Keeping, ...] = ()) -> Plan:
    stages = Stage((0, cut), ("a",), (), keeping=keeping), Stage((cut, 6), ("b",), (), keeping=keeping)
    return from_routes(1, stages, [(("a", "b"), 4)])


def draft(cut: int, groups: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> Draft:
    return Draft(groups, (0, cut, 6), (np.array([4]),) * 2, (np.array([[4]]),))


# A layer's state is 400 bytes on the device; or 200 there, and 300 in the host's memory.
@pytest.mark.parametrize(
    ("groups", "cut", "node", "held"),
    [
        (((0,), (1,)), 4, "a", 4 * 400),  # one layer more
        (((0,), (1,)), 2, "b", 4 * 400),
        (((1,), (0,)), 3, "b", 6 * 400),  # all others
    ],
)
def test_layers_that_are_in_both_stages_count_once(
    groups: tuple[tuple[int, ...], ...], cut: int, node: str, held: float
) -> None:
    workload = Workload(LAYERS, 4)
    assert short_of_memory(Problem(cluster(held), workload), plan(3), draft(cut, groups)) is None
    assert short_of_memory(Problem(cluster(held - 2), workload), plan(3), draft(cut, groups)) == (node, 2.0)
    assert short_of_memory(Problem(cluster(1.0), workload), plan(3), draft(3)) is None


def test_the_hosts_memory_may_be_what_is_short() -> None:
    workload = Workload(LAYERS, 4, optimizer_state=OptimizerState.HOST)
    assert short_of_memory(Problem(cluster(1e4, 1200.0), workload), plan(3, (HOSTED,)), draft(4)) is None
    assert short_of_memory(Problem(cluster(1e4, 1198.0), workload), plan(3, (HOSTED,)), draft(4)) == ("a", 2.0)


def test_a_better_plan_is_left_alone_if_a_node_has_no_memory_to_change_to_it() -> None:
    """b computes five times as fast as a, and would hold layers 0 to 4 instead of 3 to 5: six in all until it has changed."""
    reasons = {}
    for memory in (6 * 400.0 + 50, 5 * 400.0 + 50):
        problem = Problem(cluster(memory, flops=5e9), Workload(LAYERS, 4))
        incumbent = Incumbent.of(problem, plan(3), Shape(most_stages=2))
        better = draft(5, ((1,), (0,)))
        made = decide(problem, incumbent, better, 2, Objective.ITERATION, 0.0, 1, horizon=1e6)
        reasons[made.reason] = made.sentence
    assert list(reasons) == [Reason.FASTER, Reason.KEPT]
    assert "but b lacks 0.0 MiB of memory to hold its old stage and its new one" in reasons[Reason.KEPT]


def test_a_plan_that_cannot_stay_is_replaced_even_so() -> None:
    problem = Problem(cluster(5 * 400.0 + 50, flops=5e9), Workload(LAYERS, 4))
    incumbent = Incumbent(plan(3), Reason.INFEASIBLE, Holdings.of(problem, plan(3)))
    made = decide(problem, incumbent, draft(5, ((1,), (0,))), 2, Objective.ITERATION, 0.0, 1, horizon=1e6)
    assert made.reason is Reason.INFEASIBLE
