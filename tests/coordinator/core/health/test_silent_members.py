"""Who beats but does not deliver is left out until it is tested, and whoever waited for it in vain is back at once."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.timeouts import READY_LEASES, STEP_LEASES, step_patience
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import confirm, goes_on_without, of_strangers, verdicts, wait_for_the_deadline
from tests.coordinator.script import LEASE, LONG, World, training


@pytest.mark.parametrize(
    ("expected", "usual", "leases"),
    [
        (None, True, READY_LEASES),
        (0.0, True, STEP_LEASES),
        (20 * LEASE, True, STEP_LEASES + 60),
        (20 * LEASE, False, 2 * (STEP_LEASES + 60)),
    ],
)
def test_a_steps_deadline_follows_from_what_it_is_expected_to_take(
    expected: float | None, usual: bool, leases: float
) -> None:
    assert step_patience(LEASE, expected, usual=usual) == leases * LEASE


def test_a_step_past_its_deadline_is_tried_again_from_where_it_stands() -> None:
    world = training(**LONG)
    world.vote("a")
    wait_for_the_deadline(world)
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.problem, aborted.node) == ("OVERDUE", "b")
    assert "no vote from b within 86 seconds, though heartbeats came" in aborted.reason
    assert world.last_to("a", "assignment").counts_from == 0


def out(world: World) -> set[str]:
    return set(world.state.ledger.ready) - set(world.state.ledger.working)


def hung(world: World, *nodes: str) -> None:
    """From now on these nodes do not answer tests, and all others do."""
    world.automatic_tests = False
    answered = dict.fromkeys(world.streams, 0)
    feed = world.feed

    def feed_and_test(event: t.Input) -> None:
        feed(event)
        for node in sorted(world.state.members.sessions.keys() - set(nodes)):
            asked = world.kinds_to(node).count("test")
            while answered.get(node, 0) < asked:
                answered[node] = answered.get(node, 0) + 1
                feed(t.Heard(world.streams[node], wire.NodeMessage(timed=wire.Timed(flops=1e11))))

    vars(world)["feed"] = feed_and_test


def test_a_step_past_its_deadline_goes_on_without_the_one_that_has_not_voted() -> None:
    world = training("a", "b", "c", **LONG)
    hung(world, "c")
    world.step()
    for node in "ab":
        world.vote(node)
    wait_for_the_deadline(world)
    assert out(world) == {"c"}
    assert set(world.plan_in_force.nodes) == {"a", "b"}
    assert verdicts(world) == []
    world.settle()
    goes_on_without(world)


def test_if_nobody_could_vote_working_nodes_are_back_immediately() -> None:
    """c, on the last stage, does nothing, so that nobody else can vote either."""
    world = training("a", "b", "c", **LONG)
    hung(world, "c")
    world.step()
    wait_for_the_deadline(world)
    assert out(world) == {"c"}
    assert set(world.plan_in_force.nodes) == {"a", "b"}
    world.settle()
    goes_on_without(world)
    assert verdicts(world) == []


def test_two_who_are_silent_in_turn_are_left_out_one_after_the_other_and_no_honest_one_is() -> None:
    world = training(*"abcde", **LONG)
    hung(world, "b", "e")
    world.step()
    for silent in ("b", "e"):
        for node in set(world.plan_in_force.nodes) - {silent}:
            world.vote(node)
        wait_for_the_deadline(world)
        world.settle()
    world.step()
    assert world.state.ledger.training.step == 2
    assert out(world) == {"b", "e"}
    assert world.refolded() == world.state.ledger


def test_who_does_not_become_ready_for_a_plan_is_left_out() -> None:
    world = World()
    world.join("a", "b", "c")
    hung(world, "b")
    for node in set(world.plan_in_force.nodes) - {"b"}:
        world.plan_ready(node)
    wait_for_the_deadline(world)
    assert out(world) == {"b"}
    world.settle()
    goes_on_without(world)


def before_another_plan(world: World) -> World:
    world.step()
    world.join("d")
    world.step()
    return world


def test_who_does_not_confirm_a_commit_is_left_out() -> None:
    world = before_another_plan(training("a", "b", "c", **LONG))
    hung(world, "b")
    confirm(world, "a", "c")
    assert out(world) == {"b"}
    assert (world.exit_code, verdicts(world)) == (None, [])


def test_strangers_who_all_keep_silent_after_a_commit_do_not_end_the_run() -> None:
    world = before_another_plan(of_strangers("k", "l"))
    hung(world, "k", "l")
    confirm(world)
    for _ in range(4):
        world.wait(20 * LEASE, beating=world.state.members.sessions)
    assert out(world) == {"k", "l"}
    assert (world.exit_code, verdicts(world)) == (None, [])


def test_suspicions_are_of_a_process_and_end_with_it() -> None:
    """b hung, was killed and came back; then a hung in its first step."""
    world = training("a", "b", **LONG)
    hung(world, "b")
    world.step()
    world.vote("a")
    wait_for_the_deadline(world)
    assert out(world) == {"b"}
    world.lose("b")
    world.join("b", incarnation=2)
    assert out(world) == set()
    assert dict(world.state.ledger.health) == {}
