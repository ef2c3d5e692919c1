"""The bound from all plans of a small cluster."""

import numpy as np
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from tests.scheduler.plans import iteration_bound


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10**6), count=st.integers(4, 7), layers=st.integers(2, 6))
def test_no_plan_of_an_exact_search_undercuts_the_bound(seed: int, count: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    problem = tight(rng, count, layers)
    try:
        best = schedule(problem.cluster, problem.workload, evaluations=2_000).predicted.iteration_seconds
    except Infeasible:
        return
    assert iteration_bound(problem) <= best * (1 + 1e-9)


def tight(rng: np.random.Generator, count: int, layers: int) -> Problem:
    """Unequal nodes with room for few layers and few micro-batches in flight, whose links are about as busy as their devices."""
    state, kept = 1e8, float(rng.choice([1e5, 1e6, 4e6]))
    nodes = tuple(
        Node(
            f"n{i}",
            10 ** (12 + rng.random()),
            4 * state * rng.integers(1, layers + 1) + 16 * kept * rng.integers(2, 30),
            up=float(10 ** rng.uniform(6.5, 8)) if rng.random() < 0.5 else None,
        )
        for i in range(count)
    )
    links = 10 ** (rng.uniform(5.5, 7.5) + rng.choice([0.3, 1.0]) * rng.random((count, count)))
    model = tuple(Layer("", float(rng.choice([1e11, 2e11])), state * rng.random(), kept) for _ in range(layers))
    latency = np.full((count, count), float(rng.choice([0.0, 1e-3])))
    return Problem(Cluster(nodes, latency, links), Workload(model, int(rng.choice([8, 20, 60]))))


def test_a_chain_is_as_slow_as_its_slowest_boundary() -> None:
    """Four nodes with a layer each; 100 micro-batches of 1e6 bytes cross each boundary. Each node has one link of 1e8 bytes per
    second, so that at least one boundary has a link of 1e6."""
    links = np.full((4, 4), 1e6)
    for a, b in ((0, 1), (2, 3)):
        links[a, b] = links[b, a] = 1e8
    nodes = tuple(Node(f"n{i}", 1e14, 6e8) for i in range(4))
    model = tuple(Layer("", 1e9, 1e8, 1e6) for _ in range(4))
    found = schedule(Cluster(nodes, np.zeros((4, 4)), links), Workload(model, 100))
    best = found.predicted.iteration_seconds
    assert 0.9 * best < found.lower_bound_seconds <= best
