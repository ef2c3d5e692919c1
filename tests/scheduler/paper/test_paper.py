"""The paper's cost model against a literal implementation, its search against enumeration, its bound against both."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Decision, Infeasible, Objective
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.workload import PaperCosts, Workload
from dtfm.scheduler.paper.bound import paper_bound
from dtfm.scheduler.paper.cost import paper_seconds
from dtfm.scheduler.paper.search import PaperEvaluator, interchangeable
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, shuffled
from tests.scheduler.paper_networks import Network, paper_network, paper_workload

BEST_KNOWN = {
    Network.DATA_CENTER: 3.4398,
    Network.SPOT: 31.6342,
    Network.UNIVERSITIES: 16.0868,
    Network.REGIONAL: 34.8020,
    Network.WORLDWIDE: 49.2184,
}


def literal_seconds(cluster: Cluster, costs: PaperCosts, groups: Groups) -> float:
    """Section 3.2 and 3.3, word by word, with both directions of every exchange."""
    latency, bandwidth = cluster.latency, cluster.bandwidth

    def exchange(a: int, b: int, size: float) -> float:
        return float(latency[a, b] + latency[b, a] + size / bandwidth[a, b] + size / bandwidth[b, a])

    gradient = costs.gradient_gigabytes * 1e9 / costs.replicas
    data_parallel = max(max(sum(exchange(a, b, gradient) for b in group if b != a) for a in group) for group in groups)
    activation = costs.activation_gigabytes * 1e9
    pipeline = sum(
        min(max(exchange(a, b, activation) for a, b in zip(one, order, strict=True)) for order in permutations(other))
        for one, other in pairwise(groups)
    )
    return data_parallel + pipeline


def all_equal_groups(nodes: tuple[int, ...], size: int) -> list[Groups]:
    """Every way to split the nodes into groups of one size, the order of the groups aside."""
    if not nodes:
        return [()]
    first, rest = nodes[0], nodes[1:]
    choices = {tuple(sorted(choice[: size - 1])) for choice in permutations(rest, size - 1)}
    return [
        ((first, *others), *groups)
        for others in choices
        for groups in all_equal_groups(tuple(node for node in rest if node not in others), size)
    ]


def lumpy_cluster(seed: int, count: int, regions: int) -> Cluster:
    """Directed links; regions whose nodes are interchangeable (regions = count: none are)."""
    rng = np.random.default_rng(seed)
    of = rng.integers(0, regions, count) if regions < count else np.arange(count)
    latency = rng.choice([0.001, 0.02, 0.1], (regions, regions))
    bandwidth = rng.choice([1e7, 5e7, 1e8, 1e9], (regions, regions))
    nodes = tuple(Node(f"n{index}", 1e12, 1e10) for index in range(count))
    return Cluster(nodes, latency[np.ix_(of, of)], bandwidth[np.ix_(of, of)])


def paper_job(stages: int, replicas: int, gradient: float = 0.1) -> Workload:
    return replace(even_workload(), paper=PaperCosts(stages, replicas, gradient, activation_gigabytes=0.2))


shapes = st.sampled_from([(2, 2), (3, 2), (2, 3), (4, 1), (1, 4), (5, 1)])


@given(seed=st.integers(0, 9999), shape=shapes, regions=st.integers(1, 6), gradient=st.sampled_from([0.01, 0.1, 1.0]))
def test_costs_are_the_formulas_the_search_finds_the_optimum_and_the_bound_lies_below(
    seed: int, shape: tuple[int, int], regions: int, gradient: float
) -> None:
    stages, replicas = shape
    cluster, workload = lumpy_cluster(seed, stages * replicas, regions), paper_job(stages, replicas, gradient)
    assert workload.paper is not None
    problem = Problem(cluster, workload)
    prices = []
    for groups in all_equal_groups(tuple(range(stages * replicas)), replicas):
        for order in permutations(groups):
            prices.append(paper_seconds(problem, order).total)
        assert prices[-1] == pytest.approx(literal_seconds(cluster, workload.paper, order), rel=1e-9)
    decision = schedule(cluster, workload, objective=Objective.PAPER, evaluations=20_000)
    found = decision.predicted.paper
    assert found is not None
    assert found.total == pytest.approx(min(prices), rel=1e-9)
    assert decision.lower_bound_seconds <= min(prices)


def test_nodes_of_one_region_are_interchangeable_and_class_costs_equal_node_costs() -> None:
    problem = Problem(shuffled(paper_network(Network.SPOT), 3), paper_workload())
    evaluator = PaperEvaluator.of(problem)
    assert sorted(len(nodes) for nodes in evaluator.members) == [4] * 8 + [32]
    class_of = {node: index for index, nodes in enumerate(evaluator.members) for node in nodes}
    groups = tuple(tuple(range(8 * stage, 8 * stage + 8)) for stage in range(8))
    keys = tuple(tuple(sorted(class_of[node] for node in group)) for group in groups)
    assert evaluator.total(keys) == pytest.approx(paper_seconds(problem, groups).total, rel=1e-12)
    assert len(interchangeable(np.random.default_rng(0).random((5, 5)))) == 5


def best_of(network: Network, seed: int, evaluations: int) -> Decision:
    cluster = shuffled(paper_network(network), seed)
    return schedule(cluster, paper_workload(), objective=Objective.PAPER, seed=seed, evaluations=evaluations)


@pytest.mark.parametrize("network", Network)
def test_the_best_known_cost_is_reached_on_shuffled_nodes(network: Network) -> None:
    found = best_of(network, seed=1, evaluations=20_000).predicted.paper
    assert found is not None
    assert found.total == pytest.approx(BEST_KNOWN[network], abs=1e-4)


@pytest.mark.parametrize("network", [network for network in Network if network is not Network.WORLDWIDE])
def test_the_bound_proves_four_of_the_five_networks_optimal(network: Network) -> None:
    assert paper_bound(Problem(paper_network(network), paper_workload())) == pytest.approx(
        BEST_KNOWN[network], abs=1e-4
    )


def test_nodes_beyond_the_papers_shape_stay_idle() -> None:
    cluster = lumpy_cluster(4, 7, 7)
    decision = schedule(cluster, paper_job(2, 2), objective=Objective.PAPER, evaluations=2000)
    assert len(decision.plan.idle) == 3
    assert decision.predicted.paper is not None
    assert decision.lower_bound_seconds <= decision.predicted.paper.total


def test_the_paper_objective_refuses_impossible_requests() -> None:
    cluster = lumpy_cluster(4, 4, 4)
    with pytest.raises(ValueError, match="the workload has no `paper` costs"):
        schedule(cluster, even_workload(), objective=Objective.PAPER)
    with pytest.raises(Infeasible, match="the cluster has 4: 2 too few"):
        schedule(cluster, paper_job(3, 2), objective=Objective.PAPER)
    with pytest.raises(ValueError, match="stages is 3; the workload's `paper` names 2 stages of 2"):
        schedule(cluster, paper_job(2, 2), stages=3, objective=Objective.PAPER)
