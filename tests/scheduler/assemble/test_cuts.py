"""Where the model is cut."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from dtfm.scheduler.assemble.cuts import cut_model, nearly_fitting_cuts
from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.sketch import cuts_of, empty_sketch, gather_members, position_of
from dtfm.scheduler.model.sums import add_up
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import any_problem, random_cluster
from tests.scheduler.enumeration import all_cuts
from tests.scheduler.plans import memory_shortfall, random_draft


def cut(problem: Problem, groups: Groups) -> tuple[int, ...] | None:
    """The cuts for these groups; None if the search finds none."""
    position, sketch = position_of(groups, (), len(problem.flops)), empty_sketch(tables(problem))
    assert gather_members(position, sketch)
    add_up(tables(problem), sketch.sums, position.place, len(groups))
    return cuts_of(position) if cut_model(tables(problem), sketch, len(groups), position.cuts) else None


@given(seed=st.integers(0, 10**6), count=st.integers(1, 8), layers=st.integers(1, 8))
@example(
    seed=38156, count=8, layers=8
)  # the second stage has no room for the layers behind the first one's largest share
def test_every_stage_gets_layers_that_fit_unless_no_cuts_do_or_a_group_cannot_reduce(
    seed: int, count: int, layers: int
) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    groups = random_draft(rng, problem).groups
    cuts = cut(problem, groups)
    if cuts is None:
        reducible = all(np.isfinite(problem.slowness[np.ix_(group, group)]).all() for group in groups)
        linked = len(problem.flops) == 1 or ((problem.up > 0).all() and (problem.down > 0).all())
        ways = all_cuts(layers, len(groups)).tolist()
        assert not (reducible and linked) or all(memory_shortfall(problem, groups, tuple(way)) for way in ways)
        return
    assert (cuts[0], cuts[-1]) == (0, layers)
    assert all(a < b for a, b in itertools.pairwise(cuts))
    assert memory_shortfall(problem, groups, cuts) == 0.0


def problem_of(
    speeds: tuple[float, ...], layers: int, gradients: float = 1.0, memory: float = 1e12, slow: tuple[int, ...] = ()
) -> Problem:
    """Layers of 1 FLOP and ``gradients`` bytes, 100 micro-batches of almost no bytes. The links of the nodes ``slow`` carry 1
    byte per second, the others any number."""
    count = len(speeds)
    bandwidth = np.full((count, count), 1e9)
    bandwidth[list(slow)] = 1.0
    bandwidth[:, list(slow)] = 1.0
    nodes = tuple(Node(f"n{i}", speed, memory) for i, speed in enumerate(speeds))
    return Problem(
        Cluster(nodes, np.zeros((count, count)), bandwidth), Workload((Layer("", 1.0, gradients, 1e-6),) * layers, 100)
    )


def test_stages_get_layers_in_proportion_to_their_speed() -> None:
    assert cut(problem_of((1.0, 3.0), 12), ((0,), (1,))) == (0, 3, 12)
    assert cut(problem_of((1.0, 1.0, 1.0, 3.0), 12), ((0,), (1, 2), (3,))) == (0, 2, 6, 12)


def test_a_node_with_little_memory_gets_fewer_layers() -> None:
    """Memory for the state of two layers, 4 bytes per byte of parameters, and next to nothing for activations."""
    roomy = problem_of((1.0, 1.0), 8)
    tight = Cluster(
        (Node("n0", 1.0, 1e12), Node("n1", 1.0, 4.0 * 2 + 0.1)), roomy.cluster.latency, roomy.cluster.bandwidth
    )
    assert cut(roomy, ((0,), (1,))) == (0, 4, 8)
    assert cut(Problem(tight, roomy.workload), ((0,), (1,))) == (0, 6, 8)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_whose_reduction_is_slow_gets_fewer_layers(stage: int) -> None:
    groups = ((0, 1), (2, 3))
    fast = problem_of((1.0,) * 4, 12, gradients=300.0)
    slow = problem_of((1.0,) * 4, 12, gradients=300.0, slow=groups[stage])
    assert cut(fast, groups) == (0, 6, 12)
    cuts = cut(slow, groups)
    assert cuts is not None
    assert cuts[stage + 1] - cuts[stage] < 6


def test_a_node_alone_in_its_stage_reduces_nothing_and_gets_more() -> None:
    problem = problem_of((2.0, 1.0, 1.0), 12, gradients=300.0, slow=(1, 2))
    cuts = cut(problem, ((0,), (1, 2)))
    assert cuts is not None
    assert cuts[1] > 6


def test_the_cuts_are_nearly_as_good_as_the_best_ones() -> None:
    """Compared with every way to cut, as estimated. If activations of unequal size cross slow links the cuts can be twice as
    bad."""
    ratios = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layers = tuple(Layer("", 2e11, rng.choice([2e6, 5e7]), rng.choice([1e5, 4e6])) for _ in range(8))
        problem = Problem(random_cluster(seed, 6), Workload(layers, 24))
        evaluator = Evaluator(problem, keep_idle_hands=False)
        groups = random_draft(rng, problem).groups
        made = evaluator.estimated(groups, cut(problem, groups)).seconds
        ways = all_cuts(8, len(groups)).tolist()
        ratios.append(made / min(evaluator.estimated(groups, tuple(way)).seconds for way in ways))
    assert np.median(ratios) < 1.01
    assert np.mean(ratios) < 1.25


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), layers=st.integers(1, 8))
@example(
    seed=28552, count=6, layers=7
)  # as many layers as fit on the first leave one to the second that it has no room for
def test_nearly_fitting_cuts_lack_the_least_memory(seed: int, count: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    groups = random_draft(rng, problem).groups
    position, sketch = position_of(groups, (), len(problem.flops)), empty_sketch(tables(problem))
    gather_members(position, sketch)
    add_up(tables(problem), sketch.sums, position.place, len(groups))
    nearly_fitting_cuts(tables(problem), sketch, len(groups), position.cuts)
    cuts = cuts_of(position)
    least = min(memory_shortfall(problem, groups, tuple(way)) for way in all_cuts(layers, len(groups)).tolist())
    assert memory_shortfall(problem, groups, cuts) <= least * (1 + 1e-6) + 2.0
