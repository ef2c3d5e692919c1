"""What an island has trained since the last exchange when it is given up comes again."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.owed import NOTHING_OWED, Owed
from tests.coordinator.islands import ROUNDS, each_alone, exchange
from tests.coordinator.script import World
from tests.coordinator.stores import checked


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
    assert unpack_plan(assignment.plan).owed == Owed(2 * ROUNDS, ((11, 12), (15, 16)), 2)
    assert assignment.counts_from == assignment.generation
    assert "2 micro-batches that an island had trained since the last exchange come again" in assignment.reason


def test_later_plans_say_so_until_all_has_come_again() -> None:
    world = without_the_last()
    owed = world.plan_in_force.owed
    world.settle()
    exchange(world)
    world.lose("b")
    assert world.plan_in_force.owed == Owed(2 * ROUNDS, (), owed.behind)
    assert world.last_to("a", "assignment").counts_from == world.plan_in_force.generation


def test_where_nothing_was_trained_since_the_last_exchange_nothing_is_owed() -> None:
    world = without_the_last(steps=0)
    assert world.plan_in_force.owed == NOTHING_OWED
    assert world.last_to("a", "assignment").counts_from < world.plan_in_force.generation


def test_a_log_says_how_much_came_again_and_one_that_hides_it_is_found_out() -> None:
    world = without_the_last()
    owed = world.plan_in_force.owed
    assert (checked(world.records).again, checked(world.records).owed) == (0, 2)
    world.settle()
    world.step()
    result = checked(world.records)
    assert (result.findings, result.again, result.owed) == ((), 2, 0)
    for other in (NOTHING_OWED, replace(owed, again=((0, 1),))):
        forged = [
            Record(record.sequence, record.time, replace(event, plan=replace(event.plan, owed=other)))
            if isinstance(event := record.event, ev.PlanAdopted) and event.plan.owed == owed
            else record
            for record in world.records
        ]
        assert "does not train again what an island has lost" in checked(forged).findings[0].sentence
