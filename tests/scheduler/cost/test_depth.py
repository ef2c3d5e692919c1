"""How many micro-batches a stage holds in flight: a round trip's worth, as far as there is memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dtfm.scheduler.cost.depth import SLACK, depths
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE, in_flight
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule

STAGES, ACTIVATION = 3, 1000.0
WORKLOAD = Workload(tuple(Layer("", 1e9, 500.0, ACTIVATION) for _ in range(STAGES)), micro_batches=30)
CHAIN = Draft(((0,), (1,), (2,)), (0, 1, 2, 3), np.array([[0, 1, 2]]), np.array([WORKLOAD.micro_batches]))


def problem(latency: float, memory: float = 1e12) -> Problem:
    """Three nodes that take a second forward and two backward, on links that carry anything in no time."""
    nodes = tuple(Node(f"n{number}", 1e9, memory) for number in range(STAGES))
    return Problem(Cluster(nodes, np.full((STAGES, STAGES), latency), np.full((STAGES, STAGES), 1e15)), WORKLOAD)


def test_on_near_links_it_is_two_per_stage_from_this_one_on() -> None:
    near = depths(problem(0.0), CHAIN).tolist()
    assert near == [in_flight(stage, STAGES) for stage in range(STAGES)] == [6, 4, 1]


def test_on_far_links_it_is_more_and_a_step_takes_hardly_longer() -> None:
    far = problem(latency=6.0)  # there and back is 4 micro-batches' time
    assert depths(far, CHAIN).tolist() == [6 + SLACK * 8, 4 + SLACK * 4, 1]
    assert simulate(far, CHAIN) < simulate(problem(0.0), CHAIN) + 4 * 6.0 + 3 * 3.0


def test_it_is_never_more_than_there_is_memory_for_nor_less_than_a_valid_plan_has_room_for() -> None:
    kept = KEPT_PER_OUTPUT_BYTE * ACTIVATION
    state = 4 * 500.0
    assert depths(problem(6.0, memory=state + 13 * kept), CHAIN).tolist() == [13, 12, 1]
    assert depths(problem(6.0, memory=state + kept), CHAIN).tolist() == [6, 4, 1]


def test_it_is_never_more_than_a_step_has_micro_batches() -> None:
    assert depths(problem(1e6), CHAIN).tolist() == [30, 30, 1]


def test_a_plan_tells_its_nodes() -> None:
    far = problem(latency=6.0)
    plan = schedule(replace(far.cluster), WORKLOAD, stages=STAGES).plan
    assert [stage.in_flight for stage in plan.stages] == [6 + SLACK * 8, 4 + SLACK * 4, 1]
