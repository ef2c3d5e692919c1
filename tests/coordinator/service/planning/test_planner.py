"""The shell around the scheduler: how long it looks, and what it answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.transition import PlanWanted
from dtfm.coordinator.service.planning.planner import Kept, choose
from dtfm.scheduler.islands.advice import NO_ROUNDS_PAY
from dtfm.scheduler.islands.layout import lay_out
from dtfm.scheduler.model.decision import Decision
from dtfm.scheduler.model.plan import Stage, from_routes, joined
from dtfm.scheduler.model.population import Population
from dtfm.scheduler.model.rounds import MEASURED, Rounds
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.search import TimeUsed
from tests.coordinator.serving import serving
from tests.scheduler.clusters import even_workload, random_cluster
from tests.scheduler.islands.test_layout import MEGABIT, cities
from tests.scheduler.llama import llama

WANTED = PlanWanted(
    number=1,
    cluster=lambda: random_cluster(5, 6),
    workload=even_workload(),
    incumbent=None,
    stages=2,
    seed=0,
    generation=3,
    overhead=0.0,
    horizon=1800.0,
    seconds=0.1,
)


@pytest.fixture(autouse=True)
def time_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner tries as many plans as on a machine of its own, however busy this one is."""

    def time_used(seconds: float) -> TimeUsed:
        began = time.process_time()
        return lambda: (time.process_time() - began) / seconds

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner._time_used", time_used)


def test_a_plan_comes_with_a_bound() -> None:
    chosen = choose(WANTED)
    assert isinstance(chosen, PlanChosen)
    assert chosen.plan.generation == 3
    assert chosen.predicted_seconds is not None
    assert chosen.lower_bound_seconds is not None
    assert 0 < chosen.lower_bound_seconds <= chosen.predicted_seconds


def test_rounds_are_chosen_if_the_run_leaves_them_to_the_planner_and_a_plan_comes_with_none_if_they_gain_nothing() -> (
    None
):
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32)
    asked = replace(WANTED, workload=workload, stages=None, seconds=1.0, lengths=(0, *MEASURED))
    slow = choose(replace(asked, cluster=lambda: cities([1] * 8, 100 * MEGABIT, 100 * MEGABIT)))
    assert isinstance(slow, PlanChosen)
    assert (slow.length, len(slow.plan.islands)) == (100, 8)
    assert " 8 islands that exchange every 100 steps reach the same loss some " in slow.reason
    fast = choose(replace(asked, cluster=lambda: cities([4], 1250e6, 1250e6)))
    assert isinstance(fast, PlanChosen)
    assert (fast.length, fast.reason) == (0, f"No plan was in force. {NO_ROUNDS_PAY}")
    assert len(fast.plan.nodes) == 4


def test_islands_are_drawn_anew_with_other_rounds_and_one_node_that_is_left_needs_none() -> None:
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32)
    lines = cities([1] * 8, 100 * MEGABIT, 100 * MEGABIT)
    asked = replace(WANTED, workload=workload, stages=None, seconds=1.0, cluster=lambda: lines)
    alone = choose(replace(asked, cluster=lambda: lines.only([0])))
    assert isinstance(alone, PlanChosen)
    asked = replace(asked, horizon=1e5)  # the others all wait for n0, which sends its state over one line
    begun = choose(replace(asked, incumbent=alone.plan, lengths=(0, *MEASURED), islands={"n0": 0}))
    assert isinstance(begun, PlanChosen)
    assert (len(begun.plan.islands), begun.length) == (8, 100)
    before = replace(begun.plan, rounds=Rounds(7, 1000, 10))
    asked = replace(asked, incumbent=before, lengths=(100, 0, 10, 30), islands={"n3": 3})
    ended = choose(replace(asked, cluster=lambda: lines.only([3])))
    assert isinstance(ended, PlanChosen)
    assert (ended.plan.nodes, ended.plan.stages[0].island, ended.length) == (("n3",), 3, 0)


def test_what_steps_take_beside_the_model_counts_with_rounds_too() -> None:
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32)
    lines = cities([1] * 4, 3000 * MEGABIT, 3000 * MEGABIT)
    asked = replace(WANTED, workload=workload, stages=None, seconds=1.0, cluster=lambda: lines, lengths=(0, *MEASURED))
    found = [choose(replace(asked, overhead=overhead)) for overhead in (0.0, 5.0)]
    assert [each.length for each in found if isinstance(each, PlanChosen)] == [0, 0]
    slow, late = (choose(replace(asked, overhead=seconds, lengths=(30,))) for seconds in (0.0, 5.0))
    assert isinstance(slow, PlanChosen)
    assert isinstance(late, PlanChosen)
    assert slow.predicted_seconds is not None
    assert late.predicted_seconds is not None
    assert late.predicted_seconds > slow.predicted_seconds + 4.9


@pytest.mark.parametrize(("known", "number"), [({"old": 0}, 0), ({"old": 2, "n1": 1}, 1), ({}, 0)])
def test_a_plan_whose_nodes_are_all_new_goes_on_with_the_island_that_there_is(
    known: dict[str, int], number: int
) -> None:
    fast = cities([2], 1250e6, 1250e6)
    chosen = choose(replace(WANTED, workload=llama("1.1B"), stages=None, cluster=lambda: fast, islands=known))
    assert isinstance(chosen, PlanChosen)
    assert {stage.island for stage in chosen.plan.stages} == {number}


@pytest.mark.soak
def test_a_layout_is_no_slower_than_what_was_looked_at_and_its_reason_tells_its_own_gain() -> None:
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32)
    fast = cities([1] * 32, 10_000 * MEGABIT, 10_000 * MEGABIT)
    asked = replace(WANTED, workload=workload, stages=None, seconds=1.0, cluster=lambda: fast)
    plain, found = choose(replace(asked, lengths=(0,))), choose(replace(asked, lengths=(0, *MEASURED)))
    assert isinstance(plain, PlanChosen)
    assert isinstance(found, PlanChosen)
    assert plain.predicted_seconds is not None
    assert found.predicted_seconds is not None
    assert found.predicted_seconds < 3 * plain.predicted_seconds  # both searches end when their time is up
    assert not found.length or f" {len(found.plan.islands)} islands that exchange every" in found.reason


def test_of_several_islands_the_one_goes_on_without_rounds_that_most_nodes_know() -> None:
    workload = replace(llama("1.1B"), micro_batches=512, sent_per_exchanged_byte=4.25 / 32)
    fast = cities([4], 1250e6, 1250e6)
    alone = [
        from_routes(1, [Stage((0, 24), (name,), (), island=n)], [((name,), 128)]) for n, name in enumerate(fast.ids)
    ]
    before = replace(joined(alone, 1), rounds=Rounds(0, 1000, 30))
    known = {"n0": 0, "n1": 1, "n2": 3, "n3": 3}
    chosen = choose(
        replace(
            WANTED,
            workload=workload,
            stages=None,
            cluster=lambda: fast,
            incumbent=before,
            lengths=(30, 0, 10, 100),
            islands=known,
            seconds=2.0,
        )
    )
    assert isinstance(chosen, PlanChosen)
    assert (chosen.length, {stage.island for stage in chosen.plan.stages}) == (0, {3})


def test_a_question_that_nobody_waits_for_ends_soon() -> None:
    wanted = replace(WANTED, cluster=lambda: random_cluster(5, 32), seconds=1e6)
    asked = itertools.count()
    assert choose(wanted, lambda: next(asked) > 10)
    assert choose(wanted, lambda: True) == "the question was dropped"


async def test_a_dropped_question_is_told_to_stop_and_the_next_one_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, dropped = Event(), Event()

    def first_takes_long(wanted: PlanWanted, stopped: Callable[[], bool], *_: object) -> PlanChosen | str:
        if not begun.is_set():
            begun.set()
            while not stopped():
                time.sleep(0.01)
            dropped.set()
        return choose(wanted, stopped)

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.choose", first_takes_long)
    async with serving(tmp_path) as served, served.node("a"):
        async with served.node("b"):
            assert await asyncio.to_thread(begun.wait, 30)
        assert await asyncio.to_thread(dropped.wait, 30)
        async with served.node("c"):
            await served.until(lambda: served.ledger.training.plan is not None)


def test_half_of_the_cores_are_left_to_nodes_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(options["threads"])
        return schedule(*arguments, **options)

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.schedule", spy)
    for cores in (1, 16):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        choose(WANTED)
    assert asked == [1, 8]


def test_nodes_that_allow_no_plan_are_answered_with_a_sentence() -> None:
    answer = choose(replace(WANTED, cluster=lambda: random_cluster(5, 2), stages=3))
    assert isinstance(answer, str)
    assert "1 too few" in answer


def test_the_next_search_begins_with_the_population_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Population]()

    def noted(*arguments: Any, **options: Any) -> Decision:
        asked.append(options["population"])
        return schedule(*arguments, **options)

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.schedule", noted)
    kept = Kept()
    first = choose(WANTED, kept=kept)
    assert isinstance(first, PlanChosen)
    population = kept.plans
    assert population
    left = random_cluster(5, 6).only(range(5))
    second = choose(replace(WANTED, cluster=lambda: left, incumbent=first.plan, generation=4), kept=kept)
    assert isinstance(second, PlanChosen)
    assert "n5" not in second.plan.nodes
    assert asked == [(), population]
    after = {node for member in kept.plans for island in member.islands for stage in island.stages for node in stage}
    assert after <= {*left.ids}


def test_the_next_layout_begins_with_those_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Population]()

    def noted(*arguments: Any, **options: Any) -> Decision:
        asked.append(options["population"])
        return lay_out(*arguments, **options)

    monkeypatch.setattr("dtfm.coordinator.service.planning.planner.layout.lay_out", noted)
    kept, wanted = Kept(), replace(WANTED, lengths=(30,))
    assert isinstance(choose(wanted, kept=kept), PlanChosen)
    first = kept.layouts
    assert isinstance(choose(wanted, kept=kept), PlanChosen)
    assert asked == [(), first]
    assert first
    assert not kept.plans
