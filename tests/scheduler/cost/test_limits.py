"""What limits a plan: `cost/limits.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtfm.scheduler.cost.limits import Limit, limits
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.workload import Layer, Workload

NODES = np.array([[4, 0], [0, 4]])


def problem_of(flops: float = 1e12, activation: float = 1.0, parameters: float = 1.0, memory: float = 1e12) -> Problem:
    """Four nodes on links of 1 MB/s, two layers of 0.01 s."""
    cluster = Cluster(
        tuple(Node(f"n{i}", flops, memory) for i in range(4)), np.full((4, 4), 1e-4), np.full((4, 4), 1e6)
    )
    layers = (Layer("", 1e10, parameters, activation, 100.0),) * 2
    return Problem(cluster, Workload(layers, 8, checkpointing=None))


TWO_BY_TWO = Draft.of(((0, 1), (2, 3)), (0, 1, 2), (np.array([4, 4]),) * 2, (NODES,))


@pytest.mark.parametrize(
    ("problem", "limit"),
    [
        (problem_of(), Limit.DEVICE),
        (problem_of(activation=1e6), Limit.LINK),
        (problem_of(parameters=1e7), Limit.REDUCTION),
        # Room for one micro-batch in the last stage; the first one has four in flight, and computes its layer again.
        (problem_of(activation=10.0, parameters=1e-3, memory=300.0), Limit.MEMORY),
    ],
)
def test_the_resource_of_which_twice_as_much_saves_most_is_the_limit(problem: Problem, limit: Limit) -> None:
    saved = limits(problem, TWO_BY_TWO)
    if limit is Limit.MEMORY:
        assert saved[limit] > 0.05 * simulate(problem, TWO_BY_TWO)
    else:
        assert next(iter(saved)) is limit
        assert saved[limit] > 0.3 * simulate(problem, TWO_BY_TWO)


def test_what_is_saved_is_what_the_better_cluster_would_save() -> None:
    problem = problem_of(activation=1e4, parameters=1e6)
    nodes = tuple(replace(node, flops=2 * node.flops) for node in problem.cluster.nodes)
    faster = Problem(replace(problem.cluster, nodes=nodes), problem.workload)
    expected = simulate(problem, TWO_BY_TWO) - simulate(faster, TWO_BY_TWO)
    assert limits(problem, TWO_BY_TWO)[Limit.DEVICE] == pytest.approx(expected)
