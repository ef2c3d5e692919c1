"""Who beats but does not deliver is found after three attempts, and whoever waited for it in vain is not blamed."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Pausing, Stepping, Switching
from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.core.timeouts import PATIENCE_LEASES, STEP_LEASES, step_patience
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import confirm, goes_on_without, of_strangers, verdicts, wait_for_the_deadline
from tests.coordinator.script import LEASE, LONG, World, training


@pytest.mark.parametrize(
    ("last", "usual", "overdue", "leases"),
    [
        (None, True, 0, PATIENCE_LEASES),
        (0.1, True, 0, STEP_LEASES),
        (0.1, True, 1, 2 * STEP_LEASES),
        (0.1, True, 10, PATIENCE_LEASES),
        (0.1, False, 0, PATIENCE_LEASES),
        (20 * LEASE, True, 0, 400),
        (20 * LEASE, False, 0, 400),
    ],
)
def test_deadlines_follow_from_the_last_step(last: float | None, usual: bool, overdue: int, leases: float) -> None:
    assert step_patience(LEASE, last, usual=usual, overdue=overdue) == leases * LEASE


def test_a_step_past_its_deadline_is_tried_again_from_where_it_stands() -> None:
    world = training(**LONG)
    world.vote("a")
    wait_for_the_deadline(world)
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.problem, aborted.node) == ("OVERDUE", "b")
    assert "no vote from b within 1000 seconds, though heartbeats came" in aborted.reason
    assert world.last_to("a", "assignment").counts_from == 0


def test_who_does_not_deliver_what_it_has_all_for_is_left_out_after_three_attempts() -> None:
    """c, on the last stage, gets all activations and does nothing. Nobody else can vote either."""
    world = training("a", "b", "c", **LONG)
    world.step()
    for attempt in range(ATTEMPTS):
        assert verdicts(world) == []
        wait_for_the_deadline(world)
        if attempt < ATTEMPTS - 1:
            for node in world.plan_in_force.nodes:
                has = wire.Progress(activations=range(4) if node == "c" else ())
                world.plan_ready(node, progress=has)
    assert verdicts(world) == [("c", Charge.STALLED, False)]
    goes_on_without(world, "c")


def test_two_who_are_silent_in_turn_are_found_one_after_the_other_and_no_honest_one_is_lost() -> None:
    world = training(*"abcde", **LONG)
    world.step()
    deadlines = 0
    while world.state.ledger.training.step == 1:
        plan, colluding = world.plan_in_force.nodes, set("be") - {node for node, _, _ in verdicts(world)}
        silent = sorted(colluding)[deadlines % len(colluding)] if colluding else ""
        for node in plan:
            if node != silent:
                world.vote(node)
        if silent:
            wait_for_the_deadline(world)
            deadlines += 1
            world.settle()
    assert verdicts(world) == [("b", Charge.STALLED, False), ("e", Charge.STALLED, False)]
    assert deadlines == 2 * ATTEMPTS
    assert set(world.plan_in_force.nodes) == set("acd")
    assert world.refolded() == world.state.ledger


def test_who_says_that_nothing_has_come_and_who_should_have_sent_it_are_kept_apart() -> None:
    world = training("a", "b", "c", **LONG)
    world.step()
    for attempt in range(ATTEMPTS):
        wait_for_the_deadline(world)
        if attempt < ATTEMPTS - 1:
            world.settle()
    assert verdicts(world) == []
    assert world.state.ledger.reach.broken == {("b", "c")}


def test_who_does_not_become_ready_for_a_plan_is_left_out_after_three_attempts() -> None:
    world = World()
    world.join("a", "b", "c")
    for _ in range(ATTEMPTS):
        for node in set(world.plan_in_force.nodes) - {"b"}:
            world.plan_ready(node)
        wait_for_the_deadline(world)
    assert verdicts(world) == [("b", Charge.STALLED, False)]
    goes_on_without(world, "b")


def test_a_newcomer_that_is_given_its_state_too_slowly_is_weighed_against_who_alone_can_give_it() -> None:
    world = training("a", "b", **LONG)
    world.step()
    world.join("c")
    world.step()
    world.apply()
    for _ in range(ATTEMPTS):
        for node in set(world.plan_in_force.nodes) - {"c"}:
            world.plan_ready(node)
        wait_for_the_deadline(world)
    assert verdicts(world) == [("c", Charge.STALLED, True)]
    assert world.events(ev.NodeQuarantined)[-1].against == ("b",), "b alone has what c needs"


def waits_in_vain(world: World, node: str, times: int) -> None:
    """All others are ready for the plan, so many times, and the node says nothing but that it is alive."""
    assert isinstance(world.state.phase, Switching)
    for _ in range(times):
        for other in set(world.plan_in_force.nodes) - {node}:
            world.plan_ready(other)
        world.wait(PATIENCE_LEASES * LEASE + 1, beating=world.state.members.sessions)


def comes_into_the_plan(world: World, node: str, incarnation: int) -> None:
    world.join(node, incarnation=incarnation)
    world.step()
    if isinstance(world.state.phase, Pausing):
        world.apply()
    assert node in world.plan_in_force.nodes


def silent_until_it_left() -> World:
    """m was silent in two attempts, left, and came back after another step of the others."""
    world = of_strangers("a", "b", stages=1)
    comes_into_the_plan(world, "m", 1)
    waits_in_vain(world, "m", ATTEMPTS - 1)
    world.lose("m")
    world.settle()
    comes_into_the_plan(world, "m", 2)
    return world


def test_who_leaves_before_it_is_found_and_comes_back_is_as_silent_as_before() -> None:
    world = silent_until_it_left()
    waits_in_vain(world, "m", 1)
    assert verdicts(world) == [("m", Charge.STALLED, True)], "b alone has what it needs"
    goes_on_without(world, "m")


def test_who_has_done_a_step_since_it_was_silent_begins_anew() -> None:
    world = silent_until_it_left()
    world.settle()
    world.step()
    assert world.state.ledger.trust.suspicions == ()
    assert world.refolded() == world.state.ledger


def before_another_plan(world: World) -> World:
    world.step()
    world.join("d")
    world.step()
    return world


def test_who_does_not_confirm_a_commit_is_left_out_after_three_attempts() -> None:
    world = before_another_plan(training("a", "b", "c", **LONG))
    confirm(world, "a", "c")
    waits_in_vain(world, "b", ATTEMPTS - 1)
    assert verdicts(world) == [("b", Charge.STALLED, False)]
    assert world.exit_code is None


def test_strangers_who_all_keep_silent_after_a_commit_do_not_end_the_run() -> None:
    world = before_another_plan(of_strangers("k", "l"))
    confirm(world)
    assert isinstance(world.state.phase, Switching)
    for _ in range(ATTEMPTS - 1):
        assert verdicts(world) == []
        wait_for_the_deadline(world)
    assert verdicts(world) == [("l", Charge.STALLED, True)]
    assert world.exit_code is None
    assert not isinstance(world.state.phase, Stepping)
