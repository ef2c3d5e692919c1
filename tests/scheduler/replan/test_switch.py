"""The memory that a change of plan takes: `replan/replan.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.cost.state_transfer import Holdings
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Reason
from dtfm.scheduler.model.memory import LADDER, Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.replan.replan import Incumbent, decide, short_of_memory

LAYERS = (Layer("", 1e9, 100.0, 1e-3),) * 6
HOSTED = Keeping(Checkpointing.NONE, OptimizerState.HOST)


def cluster(memory: float, host: float | None = None, flops: float = 1e9) -> Cluster:
    nodes = Node("a", 1e9, memory, host_memory_bytes=host), Node("b", flops, memory, host_memory_bytes=host)
    return Cluster(nodes, np.full((2, 2), 1e-3), np.full((2, 2), 1e6))


def plan(cut: int, keeping: tuple[Keeping, ...] = ()) -> Plan:
    stages = Stage((0, cut), ("a",), (), keeping=keeping), Stage((cut, 6), ("b",), (), keeping=keeping)
    return from_routes(1, stages, [(("a", "b"), 4)])


def draft(cut: int, groups: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> Draft:
    return Draft.of(groups, (0, cut, 6), (np.array([4]),) * 2, (np.array([[4]]),))


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


def test_of_state_that_moves_to_the_device_only_what_is_there_already_counts_once() -> None:
    """Node a trades layers 0 to 2 for layers 1 to 5: of each that it keeps, 200 of 400 bytes are on the device already."""
    workload = Workload(LAYERS, 4, optimizer_state=None)
    new = Draft.of(((1,), (0,)), (0, 1, 6), (np.array([4]),) * 2, (np.array([[4]]),))
    for memory, lacks in ((3 * 200 + 5 * 400 - 2 * 200, None), (3 * 200 + 5 * 400 - 2 * 200 - 2, ("a", 2.0))):
        assert short_of_memory(Problem(cluster(memory, 1e5), workload), plan(3, (HOSTED,)), new) == lacks


@given(
    old=st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda cuts: cuts[0] < cuts[1]),
    cut=st.integers(1, 5),
    seat=st.integers(0, 1),
    before=st.sampled_from(LADDER),
    after=st.sampled_from(LADDER),
    copy=st.sampled_from((0.0, 0.5)),
)
def test_what_a_switch_takes_is_what_a_count_by_layer_gives(
    old: tuple[int, int], cut: int, seat: int, before: Keeping, after: Keeping, copy: float
) -> None:
    """On the device and in the host's memory, each layer takes the more of what it takes before and after."""
    workload = Workload(
        tuple(Layer("", 1e9, 100.0 * (1 + index), 1e-3) for index in range(6)),
        4,
        copy_bytes_per_parameter_byte=copy,
        checkpointing=after.checkpointing,
        optimizer_state=after.optimizer_state,
    )
    new = ((0, cut), (cut, 6))[seat]
    stages = (Stage(old, ("a",), (), keeping=(before,)),)
    incumbent = Plan(1, stages, (), ())

    def held(layers: tuple[int, int], layer: int, keeping: Keeping) -> tuple[float, float]:
        size = 100.0 * (1 + layer) if layers[0] <= layer < layers[1] else 0.0
        if keeping.optimizer_state is OptimizerState.DEVICE:
            return size * (4 + copy), 0.0
        return size * ((copy or 1) + 1), size * 3

    both = [(held(old, layer, before), held(new, layer, after)) for layer in range(6)]
    device, host = (sum(max(one[part], other[part]) for one, other in both) for part in (0, 1))
    groups = ((0,), (1,)) if seat == 0 else ((1,), (0,))
    for memory, beside in ((device, host), (device - 2, host), (device, host - 2)):
        beside = max(beside, 1.0)
        nodes = Node("a", 1e9, memory, host_memory_bytes=beside), Node("b", 1e9, 1e9, host_memory_bytes=1e9)
        two = Cluster(nodes, np.full((2, 2), 1e-3), np.full((2, 2), 1e6))
        lacks = 0.0 if (new, after) == (old, before) else max(device - memory, host - beside)
        found = short_of_memory(Problem(two, workload), incumbent, draft(cut, groups))
        assert found == (("a", lacks) if lacks > 1 else None)


def test_a_better_plan_is_left_alone_if_a_node_has_no_memory_to_change_to_it() -> None:
    """b computes five times as fast as a, and would hold layers 0 to 4 instead of 3 to 5: six in all until it has changed."""
    reasons = {}
    for memory in (6 * 400.0 + 50, 5 * 400.0 + 50):
        problem = Problem(cluster(memory, flops=5e9), Workload(LAYERS, 4))
        incumbent = Incumbent.of(problem, plan(3), Shape(most_stages=2))
        better = draft(5, ((1,), (0,)))
        made = decide(problem, incumbent, better, 2, 0.0, 1, horizon=1e6)
        reasons[made.reason] = made.sentence
    assert list(reasons) == [Reason.FASTER, Reason.KEPT]
    assert "but b lacks 0.0 MiB of memory to hold its old stage and its new one" in reasons[Reason.KEPT]


def test_a_plan_that_cannot_stay_is_replaced_even_so() -> None:
    problem = Problem(cluster(5 * 400.0 + 50, flops=5e9), Workload(LAYERS, 4))
    incumbent = Incumbent(plan(3), Reason.INFEASIBLE, Holdings.of(problem, plan(3)))
    made = decide(problem, incumbent, draft(5, ((1,), (0,))), 2, 0.0, 1, horizon=1e6)
    assert made.reason is Reason.INFEASIBLE
