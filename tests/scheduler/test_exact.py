"""The enumeration of small clusters: its bound against the simulation, its plan against all others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.scheduler.evaluate import Evaluator, simulated
from dtfm.scheduler.exact import all_cuts, plan_bounds
from dtfm.scheduler.moves import Shape
from dtfm.scheduler.problem import Problem
from dtfm.scheduler.routes import route
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.seeds import all_groups
from tests.scheduler.clusters import even_workload, random_cluster


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), micro_batches=st.integers(3, 9), activation=st.sampled_from([1e4, 1e6, 8e6]))
def test_no_plan_is_simulated_faster_than_its_bound(seed: int, micro_batches: int, activation: float) -> None:
    problem = Problem(random_cluster(seed, 3), even_workload(4, micro_batches, activation))
    for groups in all_groups(3, Shape(most_stages=3)):
        cuts = all_cuts(4, len(groups))
        for bound, cut in zip(plan_bounds(problem, groups, cuts), cuts.tolist(), strict=True):
            draft = route(problem, groups, tuple(cut))
            if set(draft.chains.ravel().tolist()) == {node for group in groups for node in group}:
                assert bound <= simulated(problem, draft).seconds


@pytest.mark.parametrize("seed", range(3))
def test_four_nodes_get_the_best_of_all_plans(seed: int) -> None:
    cluster, workload = random_cluster(seed, 4), even_workload(4, 6)
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)
    best = min(
        evaluator.simulated(groups, tuple(cuts)).seconds
        for groups in all_groups(4, Shape(most_stages=4))
        for cuts in all_cuts(4, len(groups)).tolist()
    )
    assert schedule(cluster, workload).predicted.iteration_seconds == pytest.approx(best, rel=1e-12)
