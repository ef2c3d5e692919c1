"""The exact search of small clusters: its bounds against the simulation, its plan against all others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.assemble.flows import connected
from dtfm.scheduler.cost.plan_bounds import plan_bounds
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.branch_and_bound import promising
from tests.scheduler.clusters import even_workload, random_cluster
from tests.scheduler.enumeration import all_cuts, all_groups

SHAPES = [Shape(most_stages=4), Shape(stages=2, most_stages=2), Shape(stages=2, sizes=(2, 1), most_stages=2)]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), micro_batches=st.integers(3, 9), activation=st.sampled_from([1e4, 1e6, 8e6]))
def test_no_plan_is_simulated_faster_than_its_bound(seed: int, micro_batches: int, activation: float) -> None:
    problem = Problem(random_cluster(seed, 3), even_workload(4, micro_batches, activation))
    for groups in all_groups(3, Shape(most_stages=3)):
        cuts = all_cuts(4, len(groups))
        for bound, cut in zip(plan_bounds(problem, groups, cuts), cuts.tolist(), strict=True):
            draft = connected(problem, groups, tuple(cut))
            if all(loads.all() for loads in draft.loads):
                assert bound <= simulate(problem, draft)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), micro_batches=st.integers(1, 9), shape=st.sampled_from(SHAPES))
def test_branch_and_bound_drops_no_plan_that_is_fast_enough(seed: int, micro_batches: int, shape: Shape) -> None:
    problem = Problem(random_cluster(seed, 4, unreachable=0.1), even_workload(4, micro_batches, 3e6))
    pinned = shape.sizes is not None
    evaluator = Evaluator(problem, keep_idle_hands=pinned)
    seconds = {
        (groups, cuts): evaluator.simulated(groups, cuts).seconds
        for groups in all_groups(4, shape)
        for cuts in map(tuple, all_cuts(4, len(groups)).tolist())
        if pinned or evaluator.estimated(groups, cuts).draft.groups == groups
    }
    below = sorted(seconds.values())[len(seconds) // 20]
    found = promising(problem, shape, pinned, below, most=10_000, over=lambda: False)
    bounds = {(groups, cuts): bound for bound, groups, cuts in found}
    assert set(bounds) >= {plan for plan, taken in seconds.items() if taken < below}
    assert all(bound <= seconds[plan] for plan, bound in bounds.items())


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_plan_for_five_nodes_is_optimal(seed: int) -> None:
    cluster, workload = random_cluster(seed, 5), even_workload(3, 5)
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)
    best = min(
        evaluator.simulated(groups, tuple(cuts)).seconds
        for groups in all_groups(5, Shape(most_stages=3))
        for cuts in all_cuts(3, len(groups)).tolist()
    )
    assert schedule(cluster, workload).predicted.iteration_seconds == pytest.approx(best, rel=1e-12)
