"""The population at the end of a search, where the next search begins."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.population import Island, Member, Population
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.sketch import NO_LINK
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.anneal import Found
from dtfm.scheduler.search.population import ALIKE, children, held, in_common, survivors
from tests.scheduler.clusters import even_workload, random_cluster
from tests.scheduler.plans import random_draft


def island_of(plan: Plan) -> Island:
    return Island(tuple(stage.replicas for stage in plan.stages), (0, *(stage.layers[1] for stage in plan.stages)))


def without(cluster: Cluster, *names: str) -> Cluster:
    return cluster.only([number for number, name in enumerate(cluster.ids) if name not in names])


def assert_members(population: Population, cluster: Cluster, layers: int) -> None:
    assert len(set(population)) == len(population)
    for member in population:
        (island,) = member.islands
        nodes = [node for stage in island.stages for node in stage]
        assert len(set(nodes)) == len(nodes)
        assert set(nodes) <= set(cluster.ids)
        assert all(island.stages)
        assert (island.cuts[0], island.cuts[-1], len(island.cuts)) == (0, layers, len(island.stages) + 1)
        assert all(a < b for a, b in pairwise(island.cuts))


TWELVE, WORKLOAD = random_cluster(5, 12), even_workload()


@pytest.fixture(scope="module")
def kept() -> Population:
    return schedule(TWELVE, WORKLOAD, evaluations=20_000).population


def test_a_decision_has_its_plan_first_and_members_with_names_and_all_layers() -> None:
    found = schedule(TWELVE, WORKLOAD, evaluations=3_000)
    assert found.population[0] == Member((island_of(found.plan),))
    assert len(found.population) > 1
    assert_members(found.population, TWELVE, 12)


def test_a_kept_population_goes_in_and_the_next_search_begins_with_the_best_member(kept: Population) -> None:
    cold, warm = (schedule(TWELVE, WORKLOAD, population=own, time_used=lambda: 1.0) for own in ((), kept))
    assert island_of(warm.plan) == kept[0].islands[0]
    assert cold.predicted.iteration_seconds > warm.predicted.iteration_seconds


@pytest.mark.parametrize("lost", [1, 2])
def test_after_a_loss_the_first_plan_is_a_repaired_members(kept: Population, lost: int) -> None:
    gone = kept[0].islands[0].stages[0][:lost]
    left = without(TWELVE, *gone)
    cold, warm = (schedule(left, WORKLOAD, population=own, time_used=lambda: 1.0) for own in ((), kept))
    assert warm.predicted.iteration_seconds < 0.95 * cold.predicted.iteration_seconds
    assert not set(gone) & set(warm.plan.nodes)
    assert_members(schedule(left, WORKLOAD, population=kept, evaluations=2_000).population, left, 12)


def test_members_of_several_islands_or_of_nobody_that_is_left_or_of_another_model_do_no_harm() -> None:
    one = Island((("n0", "n1"), ("n2",)), (0, 5, 12))
    odd = (Member((one, one)), Member((Island((("gone",),), (0, 12)),)), Member((Island((("n3",),), (0, 7)),)))
    plain = schedule(TWELVE, WORKLOAD, evaluations=400)
    assert_members(schedule(TWELVE, WORKLOAD, population=odd, evaluations=400).population, TWELVE, 12)
    assert schedule(TWELVE, WORKLOAD, population=odd[:2], evaluations=400) == plain


@pytest.mark.parametrize("stages", [3, (2, 3, 2)])
def test_members_take_the_requested_shape(kept: Population, stages: int | tuple[int, ...]) -> None:
    pinned = schedule(TWELVE, WORKLOAD, stages=stages, evaluations=2_000)
    gone = pinned.plan.stages[1].replicas[0]
    again = schedule(
        without(TWELVE, gone), WORKLOAD, population=(*kept, *pinned.population), stages=stages, evaluations=500
    )
    for member in (*pinned.population, *again.population):
        sizes = tuple(len(stage) for stage in member.islands[0].stages)
        assert sizes == stages if isinstance(stages, tuple) else len(sizes) == stages


def test_the_number_of_threads_changes_nothing_with_a_population(kept: Population) -> None:
    left = without(TWELVE, kept[0].islands[0].stages[0][0])
    one, two = (schedule(left, WORKLOAD, population=kept, evaluations=6_000, threads=threads) for threads in (1, 2))
    assert one == two


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 8), layers=st.integers(1, 6), most=st.integers(1, 6))
def test_survivors_are_the_best_that_differ(seed: int, count: int, layers: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    problem = Problem(random_cluster(seed, count), even_workload(layers))
    drafts = [random_draft(rng, problem) for _ in range(12)]
    prices = [float(price) for price in rng.choice([1.0, 2.0, 3.0, 4.0, NO_LINK + 1], 12)]
    found = [Found(price, draft.groups, draft.cuts) for price, draft in zip(prices, drafts, strict=True)]
    kept = survivors(found, count, most)
    assert len(kept) <= most
    assert [one.price for one in kept] == sorted(one.price for one in kept)
    if min(prices) < NO_LINK:
        assert kept[0].price == min(prices)
    layers_of = [held(one.groups, one.cuts, count) for one in kept]
    assert all(in_common(a, b) <= ALIKE for at, a in enumerate(layers_of) for b in layers_of[:at])
    for one in found:
        worse = [other for other in kept if other.price <= one.price]
        close = any(in_common(held(one.groups, one.cuts, count), held(o.groups, o.cuts, count)) > ALIKE for o in worse)
        assert one in kept or close or len(kept) == most or one.price >= NO_LINK


def test_two_layouts_have_the_share_of_their_nodes_layers_in_common() -> None:
    one, other = held(((0, 1), (2,)), (0, 2, 6), 4), held(((0,), (2, 3)), (0, 4, 6), 4)
    # Node 0 has layers 0 and 1 in both, and 2 and 3 in one; node 1 has 2; node 2 has 2 in both and 2 in one; node 3 has 2.
    assert in_common(one, other) == pytest.approx(4 / (4 + 2 + 4 + 2))
    assert in_common(one, one) == 1.0


def test_a_lone_member_has_itself_for_children() -> None:
    problem = Problem(TWELVE, WORKLOAD)
    evaluator = Evaluator(problem, keep_idle_hands=False)
    one = evaluator.estimated(((0, 1, 2), (3, 4)))
    alone = Found(one.price[-1], one.draft.groups, one.draft.cuts)
    assert {child.draft.groups for child in children(evaluator, [alone], 5, False, Random(0))} == {one.draft.groups}
