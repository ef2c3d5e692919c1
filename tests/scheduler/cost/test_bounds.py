"""The certified bound on the seconds per step: never above any plan, and tight where links matter."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.cost.bounds import iteration_bound, work_bound
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import even_workload, uniform_cluster
from tests.scheduler.enumeration import all_cuts, all_groups


def all_prices(problem: Problem, idle_hands: bool) -> list[float]:
    """Simulated seconds of every choice of groups and cuts, routed as plans are."""
    layers, nodes = len(problem.activation), len(problem.flops)
    evaluator = Evaluator(problem, keep_idle_hands=idle_hands)
    return [
        evaluator.simulated(groups, tuple(cuts)).seconds
        for groups in all_groups(nodes, Shape(most_stages=min(nodes, layers)))
        for cuts in all_cuts(layers, len(groups)).tolist()
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    layers=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
    alike=st.booleans(),
    slow=st.sampled_from([1e4, 1e6, 1e8]),
    idle_hands=st.booleans(),
)
def test_no_plan_undercuts_the_bound(
    seed: int, count: int, layers: int, micro_batches: int, alike: bool, slow: float, idle_hands: bool
) -> None:
    rng = np.random.default_rng(seed)
    spread = 0.0 if alike else 1.0
    nodes = tuple(
        Node(
            f"n{i}",
            10 ** (12 + spread * rng.random()),
            rng.choice([2e8, 1e9, 1e10]),
            up=1e7 if rng.random() < 0.5 else None,
            down=1e7 if rng.random() < 0.5 else None,
        )
        for i in range(count)
    )
    bandwidth = slow * 10 ** (2 * spread * rng.random((count, count))) * (rng.random((count, count)) > 0.05)
    latency = 0.1 * rng.random((count, count))
    ratio = 0.25 + 0.75 * rng.random((count, count))
    model = tuple(
        Layer("", rng.choice([1e10, 2e11]), rng.choice([1e5, 5e7]), rng.choice([1e4, 4e6])) for _ in range(layers)
    )
    problem = Problem(Cluster(nodes, latency, bandwidth, ratio), Workload(model, micro_batches))
    assert iteration_bound(problem) <= min(all_prices(problem, idle_hands)) * (1 + 1e-9)


def test_equal_devices_without_delays_reach_the_bound() -> None:
    problem = Problem(uniform_cluster(1), even_workload())
    assert min(all_prices(problem, False)) <= iteration_bound(problem) * (1 + 1e-6)


def test_poor_links_raise_the_bound_to_one_devices_time() -> None:
    far = replace(uniform_cluster(4), bandwidth=np.full((4, 4), 10.0))
    problem = Problem(far, even_workload(layers=4))
    assert iteration_bound(problem) > 3.9 * work_bound(problem.workload, problem.flops)
    assert min(all_prices(problem, False)) <= iteration_bound(problem) * (1 + 1e-6)


def test_layers_without_cost_cause_no_numerical_errors() -> None:
    workload = Workload((Layer("embedding", 0.0, 1e6, 1e4), Layer("block", 1e9, 1e6, 1e4)), 4)
    problem = Problem(uniform_cluster(3), workload)
    with np.errstate(all="raise", under="ignore"):
        assert 0 < iteration_bound(problem) < np.inf
