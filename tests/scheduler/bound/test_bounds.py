"""The certified bound on the seconds per step: never above any plan, and tight where links matter."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.bound.stage_bounds import work_bound
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from tests.bench.clusters import transformer, unequal_cluster
from tests.scheduler.clusters import even_workload, uniform_cluster
from tests.scheduler.enumeration import all_cuts, all_groups
from tests.scheduler.plans import fits, iteration_bound, random_draft, randomly_loaded
from tests.scheduler.yardstick_keeping import with_ways


def all_prices(problem: Problem, idle_hands: bool) -> list[float]:
    """Simulated seconds of every choice of groups and cuts, routed as plans are."""
    layers, nodes = len(problem.activation), len(problem.flops)
    evaluator = Evaluator(problem, keep_idle_hands=idle_hands)
    return [
        evaluator.simulated(groups, tuple(cuts)).seconds
        for groups in all_groups(nodes, Shape(most_stages=min(nodes, layers)))
        for cuts in all_cuts(layers, len(groups)).tolist()
    ]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 4), layers=st.integers(1, 4))
def test_no_plan_of_a_small_cluster_undercuts_the_bound(seed: int, count: int, layers: int) -> None:
    """All groups and cuts of a small cluster whose links and memories matter, with balanced and with random loads."""
    rng = np.random.default_rng(seed)
    problem = scarce(rng, count, layers, micro_batches=int(rng.choice([1, 4, 20, 60])))
    seconds = all_prices(problem, idle_hands=bool(rng.random() < 0.5))
    for groups in all_groups(count, Shape(most_stages=min(count, layers))):
        for cuts in all_cuts(layers, len(groups)).tolist():
            draft = randomly_loaded(rng, problem, groups, tuple(cuts))
            if fits(problem, draft):
                seconds.append(simulate(problem, draft))
    assert iteration_bound(problem) <= min(seconds) * (1 + 1e-9)


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 24), layers=st.integers(1, 8))
def test_no_random_plan_of_a_larger_cluster_undercuts_the_bound(seed: int, count: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    problem = scarce(rng, count, layers, micro_batches=int(rng.choice([2, 16, 60])))
    bound = iteration_bound(problem)
    for _ in range(20):
        draft = random_draft(rng, problem)
        if fits(problem, draft):
            assert bound <= simulate(problem, draft) * (1 + 1e-9)


def scarce(rng: np.random.Generator, count: int, layers: int, micro_batches: int) -> Problem:
    """A problem where any of devices, memory, links and connections may decide."""
    spread = rng.choice([0.0, 1.0, 1.6])

    def connection() -> float | None:
        return float(10 ** rng.uniform(5, 8)) if rng.random() < 0.5 else None

    nodes = tuple(
        Node(
            f"n{i}",
            10 ** (12 + spread * rng.random()),
            float(rng.choice([2e8, 6e8, 1e9, 1e10])),
            up=connection(),
            down=connection(),
        )
        for i in range(count)
    )
    shape = (count, count)
    bandwidth = 10 ** (rng.uniform(4, 8) + rng.choice([0.0, 0.6, 2.0]) * rng.random(shape)) * (rng.random(shape) > 0.03)
    latency = rng.choice([0.0, 1e-3, 0.1]) * rng.random(shape)
    model = tuple(
        Layer(
            "", float(rng.choice([1e10, 2e11])), float(rng.choice([1e5, 1e7, 5e7])), float(rng.choice([1e4, 1e6, 4e6]))
        )
        for _ in range(layers)
    )
    return with_ways(rng, Problem(Cluster(nodes, latency, bandwidth), Workload(model, micro_batches)))


def test_one_connection_that_carries_everything_decides() -> None:
    """Two layers, two nodes with room for one each: all activations and gradients cross one slow link."""
    model = tuple(Layer(f"l{i}", 1e10, 1e8, 1e6) for i in range(2))
    nodes = tuple(Node(f"n{i}", 1e13, 5e8) for i in range(2))
    links = np.full((2, 2), 1e6)
    problem = Problem(Cluster(nodes, np.zeros((2, 2)), links), Workload(model, 100))
    bound = iteration_bound(problem)
    assert 0.99 * 100 <= bound <= min(all_prices(problem, False))
    connected = replace(problem.cluster, nodes=tuple(replace(node, up=2e5) for node in nodes))
    assert iteration_bound(Problem(connected, problem.workload)) > 4.9 * bound


def test_memory_that_forces_short_stages_decides() -> None:
    """The fast node has room for one of three layers only, so a slow one must compute the other two, or two slow ones must."""
    model = tuple(Layer(f"l{i}", 1e11, 1e8, 1e4) for i in range(3))
    nodes = (Node("fast", 1e14, 4.5e8), Node("slow", 1e12, 1e10), Node("slower", 1e12, 1e10))
    problem = Problem(Cluster(nodes, np.zeros((3, 3)), np.full((3, 3), 1e9)), Workload(model, 100))
    best = min(all_prices(problem, False))
    assert 0.9 * 30 < iteration_bound(problem) <= best
    roomy = Cluster((replace(nodes[0], memory_bytes=1e10), *nodes[1:]), problem.latency, np.full((3, 3), 1e9))
    assert iteration_bound(Problem(roomy, problem.workload)) < 1.0


def test_equal_devices_without_delays_reach_the_bound() -> None:
    problem = Problem(uniform_cluster(1), even_workload())
    assert min(all_prices(problem, False)) <= iteration_bound(problem) * (1 + 1e-6)


def test_poor_links_raise_the_bound_to_one_devices_time() -> None:
    far = replace(uniform_cluster(4), bandwidth=np.full((4, 4), 10.0))
    problem = Problem(far, even_workload(layers=4))
    assert iteration_bound(problem) > 3.9 * work_bound(problem)
    assert min(all_prices(problem, False)) <= iteration_bound(problem) * (1 + 1e-6)


def test_the_bound_is_close_for_few_unequal_nodes_in_data_centers_and_homes() -> None:
    found = schedule(unequal_cluster(0, 8), transformer(10, 1024, micro_batches=128))
    assert found.predicted.iteration_seconds == pytest.approx(16.72, abs=0.01)
    assert 1 <= found.predicted.iteration_seconds / found.lower_bound_seconds < 1.01


def test_layers_without_cost_cause_no_numerical_errors() -> None:
    workload = Workload((Layer("embedding", 0.0, 1e6, 1e4), Layer("block", 1e9, 1e6, 1e4)), 4)
    problem = Problem(uniform_cluster(3), workload)
    with np.errstate(all="raise", under="ignore"):
        assert 0 < iteration_bound(problem) < np.inf
