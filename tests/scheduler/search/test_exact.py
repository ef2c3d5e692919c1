"""The exact search of small clusters: its bounds against the simulation, its plan against all others."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.bound.branch_and_bound import promising
from dtfm.scheduler.bound.stage_bounds import crowding, reduced_after, soonest
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search import search
from dtfm.scheduler.search.budget import Budget
from dtfm.scheduler.search.exact import improve
from tests.scheduler.clusters import any_problem, even_workload, random_cluster
from tests.scheduler.enumeration import all_cuts, all_groups
from tests.scheduler.plans import fits, randomly_loaded

SHAPES = [Shape(most_stages=4), Shape(stages=2, most_stages=2), Shape(stages=2, sizes=(2, 1), most_stages=2)]


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 4), layers=st.integers(1, 4))
def test_no_loads_undercut_the_bounds_of_branch_and_bound(seed: int, count: int, layers: int) -> None:
    """Tries also loads and flows that the scheduler would not choose."""
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    found = promising(problem, Shape(most_stages=count), False, 1e9, most=100_000, over=lambda: False)
    bounds = {found.groups_and_cuts(row): bound for row, bound in enumerate(found.bounds.tolist())}
    for groups in all_groups(count, Shape(most_stages=min(count, layers))):
        for cuts in map(tuple, all_cuts(layers, len(groups)).tolist()):
            draft = randomly_loaded(rng, problem, groups, cuts)
            if fits(problem, draft) and all(loads.all() for loads in draft.loads):
                seconds = simulate(problem, draft)
                assert np.isinf(seconds) or bounds[groups, cuts] <= seconds


@settings(max_examples=settings().max_examples // 4)
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
    bounds = {found.groups_and_cuts(row): bound for row, bound in enumerate(found.bounds.tolist())}
    assert sorted(bounds.values()) == found.bounds.tolist()
    assert set(bounds) >= {plan for plan, taken in seconds.items() if taken < below}
    assert all(bound <= seconds[plan] for plan, bound in bounds.items() if plan in seconds)


@given(seed=st.integers(0, 10_000), most=st.integers(1, 8), steps=st.sampled_from([0, 1, 9]))
def test_plans_that_branch_and_bound_leaves_out_count_in_the_least_seconds_of_all_plans(
    seed: int, most: int, steps: int
) -> None:
    problem = any_problem(np.random.default_rng(seed), 5, 4)
    shape, below = Shape(most_stages=4), 1e9
    every = promising(problem, shape, True, below, most=1_000_000, over=lambda: False)
    assert every.least == min([*every.bounds.tolist(), below])
    left = iter(range(steps))
    some = promising(problem, shape, True, below, most, over=lambda: next(left, None) is None)
    assert some.least <= every.least * (1 + 1e-8)


@given(
    paces=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    after=st.lists(st.integers(-20, 20), min_size=3, max_size=3),
    micro_batches=st.integers(0, 7),
    least=st.integers(0, 1),
)
def test_nodes_are_done_soonest_with_the_best_of_all_divisions(
    paces: list[int], after: list[int], micro_batches: int, least: int
) -> None:
    nodes = range(len(paces))
    divisions = itertools.product(range(least, micro_batches + 1), repeat=len(paces))
    best = min(
        (
            max((loads[i] * paces[i] + after[i] for i in nodes if loads[i]), default=0.0)
            for loads in divisions
            if sum(loads) == micro_batches
        ),
        default=np.inf,
    )
    found = soonest(np.array(paces, float), np.array(after[: len(paces)], float), micro_batches, least)
    assert found <= max(best, 0.0)
    assert found == pytest.approx(max(best, 0.0), rel=1e-8)


@given(seed=st.integers(0, 10_000), senders=st.integers(1, 2), receivers=st.integers(1, 2))
def test_no_flows_are_less_crowded_than_the_bound(seed: int, senders: int, receivers: int) -> None:
    """No way to send 4 micro-batches of a byte each takes less than the crowding.

    A way takes as long as the busiest link or connection, less the time of the shortest link. With free connections and one
    node on a side some way takes exactly the crowding.
    """
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, senders + receivers, 2)
    t = tables(problem)._replace(micro_batches=4)
    a, b = np.arange(senders, dtype=np.int64), np.arange(senders, senders + receivers, dtype=np.int64)
    best = np.inf
    for flow in itertools.product(range(5), repeat=senders * receivers):
        if sum(flow) == 4:
            best = min(best, _excess(problem, a, b, np.array(flow, float).reshape(senders, receivers)))
    assert crowding(t, a, b) <= best * (1 + 1e-9) + 1e-15
    if np.isfinite(best) and min(senders, receivers) == 1:
        free = t.node.copy()
        free["per_up"] = free["per_down"] = 0.0
        links = min(
            _excess(problem, a, b, np.array(flow, float).reshape(senders, receivers), connections=False)
            for flow in itertools.product(range(5), repeat=senders * receivers)
            if sum(flow) == 4
        )
        assert crowding(t._replace(node=free.view(np.recarray)), a, b) == pytest.approx(links, rel=1e-5, abs=1e-15)


def _excess(problem: Problem, a: Ints, b: Ints, flow: Floats, connections: bool = True) -> float:
    """The extra seconds that these flows, of a byte per micro-batch, keep something busy, beyond the best link with one
    micro-batch."""
    excess = 0.0
    for side, other, number in ((a, b, flow), (b, a, flow.T)):
        index = np.ix_(side, other)
        slowness = np.minimum(problem.slowness[index], 1e30)
        if (slowness[number > 0] == 1e30).any():
            return np.inf
        busy = [np.where(number > 0, number * slowness, 0.0).max()]
        if connections:
            sent, received = number.sum(axis=1), number.sum(axis=0)
            busy += (sent / problem.up[side]).tolist() + (received / problem.down[other]).tolist()
        excess = max(excess, max(busy) - slowness.min())
    return excess


def test_the_rest_of_a_reduction_after_a_nodes_last_backward_pass() -> None:
    """Two replicas of 2 layers with 2e7 bytes each, over links of known slowness.

    The shard and the sum of 2e7 bytes each go over the link from the beginning of the pass on. With slow devices, the last
    layer's 1e7 bytes go there and back instead.
    """
    problem = Problem(random_cluster(3, 2), even_workload(2))
    t, group = tables(problem), np.array([0, 1])
    there, back = float(problem.slowness[0, 1]), float(problem.slowness[1, 0])
    latency = float(problem.latency[0, 1]), float(problem.latency[1, 0])
    assert reduced_after(t, group, 0, 0, 2, 0.0) == pytest.approx(
        max(4e7 * there + latency[0], 1e7 * (there + back) + sum(latency))
    )
    assert reduced_after(t, group, 0, 0, 2, 1e6) == pytest.approx(1e7 * (there + back) + sum(latency))
    assert reduced_after(t, np.array([1]), 1, 0, 2, 1.0) == 0.0


@settings(max_examples=3)
@given(seed=st.integers(0, 10_000))
def test_the_plan_for_five_nodes_is_optimal(seed: int) -> None:
    cluster, workload = random_cluster(seed, 5), even_workload(3, 5)
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)

    def seconds(groups: Groups, cuts: list[int]) -> float:
        return evaluator.simulated(groups, tuple(cuts)).seconds

    plans = ((groups, cuts) for groups in all_groups(5, Shape(most_stages=3)) for cuts in all_cuts(3, len(groups)))
    best = min(seconds(groups, cuts.tolist()) for groups, cuts in plans)
    assert schedule(cluster, workload).predicted.iteration_seconds == pytest.approx(best, rel=1e-12)


def test_the_exact_search_knows_whether_its_budget_sufficed_for_all_plans() -> None:
    evaluator = Evaluator(Problem(random_cluster(2, 5), even_workload(3, 5)), keep_idle_hands=False)
    start, shape = evaluator.simulated(((0,),)), Shape(most_stages=3)
    best, least, finished = improve(evaluator, shape, start, Budget())
    assert finished
    assert least <= best.seconds < start.seconds
    assert not improve(evaluator, shape, start, Budget(steps=evaluator.spent + 2))[2]
    assert improve(evaluator, shape, start, Budget(time_used=lambda: 1.0)) == (start, 0.0, False)


@pytest.mark.parametrize("finished", [True, False])
def test_walks_go_on_where_the_exact_search_could_not_list_all(monkeypatch: pytest.MonkeyPatch, finished: bool) -> None:
    budgets = []

    def improved(evaluator: Evaluator, shape: Shape, best: Candidate, budget: Budget) -> tuple[Candidate, float, bool]:
        budgets.append(budget.steps)
        return best, 0.0, finished

    monkeypatch.setattr(search, "improve", improved)
    found = schedule(random_cluster(2, 5), even_workload(3, 5), evaluations=8_000)
    assert budgets == [8_000]
    assert (found.evaluations >= 8_000) is not finished
