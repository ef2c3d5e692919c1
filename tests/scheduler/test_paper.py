"""Plans by the paper's objective: against enumeration, a mixed-integer program, and the best costs that are known."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from dtfm.scheduler.bound.paper import paper_bound
from dtfm.scheduler.cost.paper import paper_seconds
from dtfm.scheduler.formats.paper import Network, paper_case, paper_network, paper_workload
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Decision, Infeasible, PaperSeconds
from dtfm.scheduler.model.problem import Floats, Problem
from dtfm.scheduler.model.workload import PaperCosts
from dtfm.scheduler.paper import plan_by_paper
from tests.scheduler.clusters import even_workload, shuffled
from tests.scheduler.equal_groups import SHAPES, all_equal_groups, lumpy_cluster, paper_job

BEST_KNOWN = {
    Network.DATA_CENTER: 3.4398,
    Network.SPOT: 31.6342,
    Network.UNIVERSITIES: 16.0868,
    Network.REGIONAL: 34.8020,
    Network.WORLDWIDE: 49.2184,
}
PROVEN = [network for network in Network if network is not Network.WORLDWIDE]


def seconds_of(decision: Decision) -> PaperSeconds:
    assert decision.predicted.paper is not None
    return decision.predicted.paper


@given(seed=st.integers(0, 9999), shape=SHAPES, regions=st.integers(1, 6), gradient=st.sampled_from([0.01, 0.1, 1.0]))
def test_the_search_finds_the_best_of_all_groups_and_the_bound_lies_below(
    seed: int, shape: tuple[int, int], regions: int, gradient: float
) -> None:
    stages, replicas = shape
    cluster, workload = lumpy_cluster(seed, stages * replicas, regions), paper_job(stages, replicas, gradient)
    exchanges = Problem(cluster, workload).paper_exchanges()
    best = min(
        paper_seconds(exchanges, order).total
        for groups in all_equal_groups(tuple(range(stages * replicas)), replicas)
        for order in permutations(groups)
    )
    decision = plan_by_paper(cluster, workload, evaluations=5000)
    assert seconds_of(decision).total == pytest.approx(best, rel=1e-9)
    assert decision.lower_bound_seconds <= best


def test_the_same_seed_gives_the_same_groups_on_any_number_of_threads() -> None:
    cluster, workload = lumpy_cluster(3, 12, 12), paper_job(3, 4)
    one, two = (plan_by_paper(cluster, workload, seed=5, evaluations=5000, threads=threads) for threads in (1, 2))
    assert one == two


@pytest.mark.parametrize("network", Network)
def test_the_best_known_cost_is_reached_on_shuffled_nodes(network: Network) -> None:
    cluster = shuffled(paper_network(network), 1)
    decision = plan_by_paper(cluster, paper_workload(), seed=1, evaluations=300_000)
    assert seconds_of(decision).total == pytest.approx(BEST_KNOWN[network], abs=1e-4)
    assert [len(stage.replicas) for stage in decision.plan.stages] == [8] * 8
    if network in PROVEN:
        assert decision.lower_bound_seconds == pytest.approx(BEST_KNOWN[network], abs=1e-4)
        assert decision.evaluations < 300_000, "a proven plan ends the search"


def test_an_unknown_case_is_told_the_five() -> None:
    assert paper_case("paper:worldwide") is Network.WORLDWIDE
    with pytest.raises(
        ValueError, match="'paper:mars' is none of the paper's networks; there are paper:data-center, paper:s"
    ):
        paper_case("paper:mars")


def test_nodes_beyond_the_groups_stay_idle() -> None:
    decision = plan_by_paper(lumpy_cluster(4, 6, 6), paper_job(2, 2), evaluations=2000)
    assert len(decision.plan.idle) == 2
    assert decision.lower_bound_seconds <= seconds_of(decision).total


def test_without_given_costs_the_layers_costs_count() -> None:
    cluster, workload = lumpy_cluster(4, 6, 6), even_workload(12, 8)  # layers of 20 MB, activations of 1 MB
    derived = plan_by_paper(cluster, workload, stages=3, evaluations=2000)
    given = plan_by_paper(cluster, replace(workload, paper=PaperCosts(3, 2, 0.08, 0.004)), evaluations=2000)
    assert seconds_of(derived).total == pytest.approx(seconds_of(given).total)


def test_requests_that_the_papers_model_cannot_serve_are_refused() -> None:
    cluster, job = lumpy_cluster(4, 4, 4), paper_job(2, 2)
    with pytest.raises(ValueError, match="the workload has no `paper` costs; add them, or say --stages"):
        plan_by_paper(cluster, even_workload())
    with pytest.raises(ValueError, match="4 nodes make no 3 equal groups; there must be a multiple of 3 nodes"):
        plan_by_paper(cluster, even_workload(), stages=3)
    with pytest.raises(Infeasible, match="the cluster has 4: 4 too few"):
        plan_by_paper(cluster, paper_job(4, 2))
    with pytest.raises(ValueError, match="stages is 4; the workload's `paper` names 2 stages of 2"):
        plan_by_paper(cluster, job, stages=4)
    with pytest.raises(ValueError, match=r"stages is \(3, 1\); the paper's groups are equal"):
        plan_by_paper(cluster, job, stages=(3, 1))
    small = tuple(replace(node, memory_bytes=1e6) for node in cluster.nodes)
    with pytest.raises(Infeasible, match=r"counts no memory .* Plan with --objective step"):
        plan_by_paper(replace(cluster, nodes=small), job, evaluations=500)
    with pytest.raises(Infeasible, match="the links that exist do not suffice for 2 stages of equal size"):
        plan_by_paper(replace(cluster, bandwidth=np.zeros((4, 4))), job, evaluations=500)


def least_seconds(exchanges: Floats, costs: PaperCosts) -> float:
    """The optimum that HiGHS finds, with all nodes taking part.

    holds[i, s]: node i has stage s. pairs[i, j, s]: i sends the output of stage s to j. The objective is the worst node's cost in
    its group, plus the dearest pair of each boundary.
    """
    gradients, activations = exchanges
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
def test_a_mixed_integer_program_agrees(stages: int, replicas: int) -> None:
    rng = np.random.default_rng(10 * stages + replicas)
    count = stages * replicas
    nodes = tuple(Node(f"n{index}", 1e12, 1e10) for index in range(count))
    cluster = Cluster(nodes, rng.uniform(0, 0.1, (count, count)), 10 ** rng.uniform(7, 9, (count, count)))
    workload = paper_job(stages, replicas)
    problem = Problem(cluster, workload)
    assert workload.paper is not None
    optimum = least_seconds(problem.paper_exchanges(), workload.paper)
    found = seconds_of(plan_by_paper(cluster, workload, evaluations=5000))
    assert found.total == pytest.approx(optimum, rel=1e-6)
    assert paper_bound(problem) <= optimum * (1 + 1e-9)
