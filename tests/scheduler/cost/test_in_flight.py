"""The number of micro-batches in flight on each node: a round trip's worth, limited by memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
from hypothesis import given, strategies as st

from dtfm.scheduler.cost.in_flight import SLACK, depths
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE, in_flight
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from tests.scheduler.drafts import drafts
from tests.scheduler.yardstick_keeping import chosen

STAGES, ACTIVATION = 3, 1000.0
WORKLOAD = Workload(tuple(Layer("", 1e9, 500.0, ACTIVATION) for _ in range(STAGES)), micro_batches=30)
ALL = np.array([WORKLOAD.micro_batches])
CHAIN = Draft.of(((0,), (1,), (2,)), (0, 1, 2, 3), (ALL,) * 3, (ALL[None],) * 2)


def problem(latency: float, memory: float = 1e12) -> Problem:
    """Three nodes that take a second forward and two backward. Their links take no time."""
    nodes = tuple(Node(f"n{number}", 1e9, memory) for number in range(STAGES))
    return Problem(Cluster(nodes, np.full((STAGES, STAGES), latency), np.full((STAGES, STAGES), 1e15)), WORKLOAD)


def test_near_links_need_two_micro_batches_per_stage_from_this_one_on() -> None:
    near = depths(problem(0.0), CHAIN)
    assert near == tuple((in_flight(stage, STAGES),) for stage in range(STAGES)) == ((6,), (4,), (1,))


def test_far_links_need_more_and_then_slow_a_step_down_little() -> None:
    far = problem(latency=6.0)  # a round trip takes as long as 4 micro-batches
    assert depths(far, CHAIN) == ((6 + SLACK * 8,), (4 + SLACK * 4,), (1,))
    assert simulate(far, CHAIN) < simulate(problem(0.0), CHAIN) + 4 * 6.0 + 3 * 3.0


def test_depth_fits_the_memory_and_is_at_least_what_every_valid_plan_allows() -> None:
    kept = KEPT_PER_OUTPUT_BYTE * ACTIVATION
    state = 4 * 500.0
    assert depths(problem(6.0, memory=state + 13 * kept), CHAIN) == ((13,), (12,), (1,))
    assert depths(problem(6.0, memory=state + kept), CHAIN) == ((6,), (4,), (1,))


def test_depth_is_at_most_the_micro_batches_of_a_step() -> None:
    assert depths(problem(1e6), CHAIN) == ((30,), (30,), (1,))


def test_a_plan_carries_the_depths() -> None:
    far = problem(latency=6.0)
    plan = schedule(replace(far.cluster), WORKLOAD, stages=STAGES).plan
    assert [stage.in_flight for stage in plan.stages] == [(6 + SLACK * 8,), (4 + SLACK * 4,), (1,)]


def by_definition(problem: Problem, draft: Draft) -> tuple[tuple[int, ...], ...]:
    """Follows every way through the draft's links on its own."""
    stages, cuts, groups = len(draft.groups), draft.cuts, draft.groups
    work = np.diff(problem.flops_before[list(cuts)])
    load = {
        node: int(n)
        for group, loads in zip(groups, draft.loads, strict=True)
        for node, n in zip(group, loads, strict=True)
    }
    ways = {node: chosen(problem, draft, stage, node) for stage, group in enumerate(groups) for node in group}
    compute = {
        node: ways[node].passes * work[stage] / problem.flops[node]
        for stage, group in enumerate(groups)
        for node in group
    }

    def seconds(way: tuple[int, ...], stage: int) -> float:
        total = float(compute[way[0]])
        for boundary, (a, b) in enumerate(pairwise(way), stage):
            if not draft.flows[boundary][groups[boundary].index(a), groups[boundary + 1].index(b)]:
                return 0.0
            size = problem.activation[cuts[boundary + 1] - 1]
            exchange = float(problem.exchange(float(size))[a, b])
            total += SLACK * exchange + float(compute[b])
        return total

    busiest = max(1e-12, *(compute[node] * load[node] for node in load))
    result = []
    for stage in range(stages - 1):
        numbers = []
        for node in groups[stage]:
            longest = max(seconds(way, stage) * load[node] for way in product((node,), *groups[stage + 1 :]))
            wanted = math.ceil(min(longest / busiest, 1e9) - 1e-6) + stages - stage
            room = ways[node].room(problem, node) / max(ways[node].each, 1.0)
            numbers.append(max(in_flight(stage, stages), min(wanted, math.floor(room), problem.workload.micro_batches)))
        result.append(tuple(numbers))
    return (*result, (1,) * len(groups[-1]))


@given(drafts(most_nodes=7, alike=False), st.booleans())
def test_the_longest_way_that_flows_allow_counts(drawn: tuple[Problem, Draft], much_memory: bool) -> None:
    problem, draft = drawn
    cluster = problem.cluster
    if much_memory:
        cluster = replace(cluster, nodes=tuple(replace(node, memory_bytes=1e18) for node in cluster.nodes))
    problem = Problem(cluster, replace(problem.workload, micro_batches=10**9))  # no limit
    assert depths(problem, draft) == by_definition(problem, draft)
