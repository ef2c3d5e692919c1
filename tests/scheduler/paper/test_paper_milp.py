"""The paper's search problem as a mixed-integer program, to check the search's optimum and the bound."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Objective
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import PaperCosts, Workload
from dtfm.scheduler.paper.bound import paper_bound
from dtfm.scheduler.paper.cost import activation_exchange, gradient_exchange
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload


def least_seconds(gradients: NDArray[np.float64], activations: NDArray[np.float64], costs: PaperCosts) -> float:
    """The optimum that HiGHS finds, with all nodes taking part.

    holds[i, s]: node i has stage s. pairs[i, j, s]: i sends the output of stage s to j. The objective is the worst
    node's cost in its group, plus the dearest pair of each boundary.
    """
    nodes, stages = len(gradients), costs.stages
    holds = np.arange(nodes * stages).reshape(nodes, stages)
    pairs = holds.size + np.arange(nodes * nodes * (stages - 1)).reshape(nodes, nodes, stages - 1)
    boundary = holds.size + pairs.size + np.arange(stages - 1)
    worst = holds.size + pairs.size + stages - 1
    rows: list[dict[int, float]] = []
    least: list[float] = []
    most: list[float] = []

    def require(row: dict[int, float], low: float, high: float) -> None:
        rows.append(row)
        least.append(low)
        most.append(high)

    for node in range(nodes):
        require({int(place): 1.0 for place in holds[node]}, 1, 1)
    for stage in range(stages):
        require({int(place): 1.0 for place in holds[:, stage]}, costs.replicas, costs.replicas)
    for node, stage in product(range(nodes), range(stages)):
        # If the node holds the stage, `worst` is at least its cost there; otherwise the constraint is void.
        all_others = float(gradients[node].sum())
        row = {int(holds[other, stage]): -float(gradients[node, other]) for other in range(nodes) if other != node}
        require({**row, int(holds[node, stage]): -all_others, worst: 1.0}, -all_others, np.inf)
    for node, stage in product(range(nodes), range(stages - 1)):
        sends = {int(pairs[node, other, stage]): 1.0 for other in range(nodes)}
        require({**sends, int(holds[node, stage]): -1.0}, 0, 0)
        receives = {int(pairs[other, node, stage]): 1.0 for other in range(nodes)}
        require({**receives, int(holds[node, stage + 1]): -1.0}, 0, 0)
        for other in range(nodes):
            price = float(activations[node, other])
            require({int(boundary[stage]): 1.0, int(pairs[node, other, stage]): -price}, 0, np.inf)

    at = [(number, column, value) for number, row in enumerate(rows) for column, value in row.items()]
    numbers, columns, values = zip(*at, strict=True)
    matrix = csr_array((values, (numbers, columns)), shape=(len(rows), worst + 1))
    binary = np.arange(worst + 1) < boundary[0]
    found = milp(
        c=(~binary).astype(float),
        integrality=binary.astype(int),
        bounds=Bounds(0, np.where(binary, 1, np.inf)),
        constraints=LinearConstraint(matrix, np.array(least), np.array(most)),
        options={"mip_rel_gap": 1e-9},
    )
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (3, 2), (2, 3), (4, 1), (2, 4)])
def test_the_search_finds_the_programs_optimum_and_the_bound_is_below(stages: int, replicas: int) -> None:
    rng = np.random.default_rng(10 * stages + replicas)
    count = stages * replicas
    nodes = tuple(Node(f"n{index}", 1e12, 1e10) for index in range(count))
    cluster = Cluster(nodes, rng.uniform(0, 0.1, (count, count)), 10 ** rng.uniform(7, 9, (count, count)))
    costs = PaperCosts(stages, replicas, gradient_gigabytes=0.1, activation_gigabytes=0.2)
    workload = Workload(even_workload().layers, 8, paper=costs)
    problem = Problem(cluster, workload)
    optimum = least_seconds(gradient_exchange(problem, costs), activation_exchange(problem, costs), costs)
    found = schedule(cluster, workload, objective=Objective.PAPER, evaluations=5000).predicted.paper
    assert found is not None
    assert found.total == pytest.approx(optimum, rel=1e-6)
    assert paper_bound(problem) <= optimum * (1 + 1e-9)
