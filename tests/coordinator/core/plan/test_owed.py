"""What an island has trained since the last exchange when it is given up comes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtfm.coordinator.core.plan.adoption import adopt
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.owed import NOTHING_OWED, Owed
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from tests.coordinator.islands import ROUNDS, each_alone, exchange
from tests.coordinator.script import LAYERS, World
from tests.coordinator.stores import checked


def each_in_its_island(*nodes: str) -> Plan:
    """With the share of a step that each has in `each_alone`."""
    shares = (4 - len(nodes) + 1, *[1] * (len(nodes) - 1))
    stages = [Stage((0, LAYERS), (node,), (), island=number) for number, node in enumerate(nodes)]
    return joined([from_routes(0, [stage], [(stage.replicas, n)]) for stage, n in zip(stages, shares, strict=True)], 0)


def without_the_last(steps: int = 1) -> World:
    """a, b and c are islands; after the first exchange and some steps c is gone. Of each step's four micro-batches it had the
    last."""
    world = each_alone("a", "b", "c")
    exchange(world)
    for _ in range(steps):
        world.step()
    world.lose("c")
    return world


def test_it_comes_first_and_no_work_on_the_step_in_hand_counts_as_it_gets_other_samples() -> None:
    world = without_the_last(ROUNDS)
    assignment = world.last_to("a", "assignment")
    assert unpack_plan(assignment.plan).owed == Owed(2 * ROUNDS, ((11, 12), (15, 16)), 16)
    assert assignment.counts_from == assignment.generation
    assert "2 micro-batches that lost islands had trained come again" in assignment.reason


def test_later_plans_say_the_same_and_work_on_the_step_in_hand_counts_under_them() -> None:
    world = without_the_last()
    owed = world.plan_in_force.owed
    world.settle()
    exchange(world)
    world.lose("b")
    assert world.plan_in_force.owed == owed
    assert "come again" not in world.last_to("a", "assignment").reason
    assert world.last_to("a", "assignment").counts_from < world.plan_in_force.generation


def test_where_nothing_was_trained_since_the_last_exchange_nothing_is_owed() -> None:
    world = without_the_last(steps=0)
    assert world.plan_in_force.owed == NOTHING_OWED
    assert world.last_to("a", "assignment").counts_from < world.plan_in_force.generation


def test_a_log_says_how_much_came_again_and_one_that_hides_it_is_found_out() -> None:
    world = without_the_last()
    owed = world.plan_in_force.owed
    assert checked(world.records).owed == 2
    world.settle()
    world.step()
    result = checked(world.records)
    assert (result.findings, result.owed) == ((), 0)
    for other in (NOTHING_OWED, replace(owed, again=((0, 1),))):
        forged = [
            Record(record.sequence, record.time, replace(event, plan=replace(event.plan, owed=other)))
            if isinstance(event := record.event, ev.PlanAdopted) and event.plan.owed == owed
            else record
            for record in world.records
        ]
        assert "does not train again what an island has lost" in checked(forged).findings[0].sentence


@pytest.mark.parametrize(("numbers", "fresh"), [((0, 1, 2), (0, 1, 3)), ((0, 2, 3), (0, 4, 3))])
def test_an_island_that_begins_within_the_round_gets_no_number_whose_samples_were_lost_nor_anothers(
    numbers: Sequence[int], fresh: Sequence[int]
) -> None:
    """c was lost, is back, and has forgotten what it had learnt."""
    world = without_the_last()
    world.automatic_planning = False
    world.join("c", incarnation=2)
    transition = Transition(world.state, world.now)
    plan = each_in_its_island("a", "b", "c")
    stages = [replace(stage, island=number) for stage, number in zip(plan.stages, numbers, strict=True)]
    adopt(transition, PlanChosen(replace(plan, stages=tuple(stages)), "for a test"), "")
    plan = transition.state.ledger.training.in_force
    assert tuple(stage.island for stage in plan.stages) == fresh
    assert plan.owed.again[-1][1] == 12
