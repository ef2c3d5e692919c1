"""The shell around the scheduler: how long it looks, and what it answers."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.state import PlanChosen
from dtfm.coordinator.core.transition import PlanWanted
from dtfm.coordinator.service.planner import choose
from dtfm.scheduler.cost.bounds import work_bound
from dtfm.scheduler.model.problem import Problem
from tests.scheduler.clusters import even_workload, random_cluster


def test_live_planning_spends_no_time_on_the_tight_bound() -> None:
    cluster, workload = random_cluster(5, 6), even_workload()
    chosen = choose(PlanWanted(1, cluster, workload, None, stages=2, seed=0, generation=3, seconds=0.1))
    assert isinstance(chosen, PlanChosen)
    assert chosen.plan.generation == 3
    flops = Problem(cluster, workload).flops
    assert chosen.lower_bound_seconds == pytest.approx(work_bound(workload, flops))


def test_nodes_that_allow_no_plan_are_answered_with_a_sentence() -> None:
    wanted = PlanWanted(1, random_cluster(5, 2), even_workload(), None, stages=3, seed=0, generation=1, seconds=0.1)
    answer = choose(wanted)
    assert isinstance(answer, str)
    assert "1 too few" in answer
