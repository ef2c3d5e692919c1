"""The number of micro-batches in flight per stage: a round trip's worth, limited by memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dtfm.scheduler.cost.in_flight import SLACK, depths
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE, in_flight
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule

STAGES, ACTIVATION = 3, 1000.0
WORKLOAD = Workload(tuple(Layer("", 1e9, 500.0, ACTIVATION) for _ in range(STAGES)), micro_batches=30)
ALL = np.array([WORKLOAD.micro_batches])
CHAIN = Draft(((0,), (1,), (2,)), (0, 1, 2, 3), (ALL,) * 3, (ALL[None],) * 2)


def problem(latency: float, memory: float = 1e12) -> Problem:
    """Three nodes that take a second forward and two backward, on links that carry anything in no time."""
    nodes = tuple(Node(f"n{number}", 1e9, memory) for number in range(STAGES))
    return Problem(Cluster(nodes, np.full((STAGES, STAGES), latency), np.full((STAGES, STAGES), 1e15)), WORKLOAD)


def test_near_links_need_two_micro_batches_per_stage_from_this_one_on() -> None:
    near = depths(problem(0.0), CHAIN).tolist()
    assert near == [in_flight(stage, STAGES) for stage in range(STAGES)] == [6, 4, 1]


def test_far_links_need_more_and_then_slow_a_step_down_little() -> None:
    far = problem(latency=6.0)  # a round trip takes as long as 4 micro-batches
    assert depths(far, CHAIN).tolist() == [6 + SLACK * 8, 4 + SLACK * 4, 1]
    assert simulate(far, CHAIN) < simulate(problem(0.0), CHAIN) + 4 * 6.0 + 3 * 3.0


def test_depth_fits_the_memory_and_is_at_least_what_every_valid_plan_allows() -> None:
    kept = KEPT_PER_OUTPUT_BYTE * ACTIVATION
    state = 4 * 500.0
    assert depths(problem(6.0, memory=state + 13 * kept), CHAIN).tolist() == [13, 12, 1]
    assert depths(problem(6.0, memory=state + kept), CHAIN).tolist() == [6, 4, 1]


def test_depth_is_at_most_the_micro_batches_of_a_step() -> None:
    assert depths(problem(1e6), CHAIN).tolist() == [30, 30, 1]


def test_a_plan_carries_the_depths() -> None:
    far = problem(latency=6.0)
    plan = schedule(replace(far.cluster), WORKLOAD, stages=STAGES).plan
    assert [stage.in_flight for stage in plan.stages] == [6 + SLACK * 8, 4 + SLACK * 4, 1]
