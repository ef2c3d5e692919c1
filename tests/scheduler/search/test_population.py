"""The population that a search ends with, and the next one begins with."""

from __future__ import annotations

from itertools import pairwise

from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.population import Island, Member
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, random_cluster


def island_of(plan: Plan) -> Island:
    return Island(tuple(stage.replicas for stage in plan.stages), (0, *(stage.layers[1] for stage in plan.stages)))


def test_a_decision_has_its_plan_first_and_members_with_names_and_all_layers() -> None:
    cluster, workload = random_cluster(5, 12), even_workload()
    found = schedule(cluster, workload, evaluations=3_000)
    assert found.population[0] == Member((island_of(found.plan),))
    assert len(set(found.population)) == len(found.population) > 1
    for member in found.population:
        (island,) = member.islands
        nodes = [node for stage in island.stages for node in stage]
        assert len(set(nodes)) == len(nodes)
        assert set(nodes) <= set(cluster.ids)
        assert all(island.stages)
        assert (island.cuts[0], island.cuts[-1], len(island.cuts)) == (0, 12, len(island.stages) + 1)
        assert all(a < b for a, b in pairwise(island.cuts))


def test_the_next_search_begins_with_the_best_member_and_ends_no_worse() -> None:
    cluster, workload = random_cluster(5, 12), even_workload()
    before = schedule(cluster, workload, evaluations=20_000)
    cold, warm = (
        schedule(cluster, workload, population=kept, seed=1, time_used=lambda: 1.0) for kept in ((), before.population)
    )
    assert warm.predicted.iteration_seconds == before.predicted.iteration_seconds
    assert cold.predicted.iteration_seconds > before.predicted.iteration_seconds
