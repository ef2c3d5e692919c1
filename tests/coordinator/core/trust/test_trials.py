"""Who is at fault for steps that come to NaN is found by trying the step without each; if it is nobody, the run is."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core.state import ATTEMPTS, Stepping, Switching
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import (
    fail_in_turn,
    goes_on_without,
    of_strangers,
    verdicts,
)
from tests.coordinator.script import LEASE, LONG, World, training


def test_three_nan_votes_of_one_alone_are_its_own_fault() -> None:
    world = training("a", "b", "c", **LONG)
    for _ in range(ATTEMPTS):
        assert isinstance(world.state.phase, Stepping)
        world.vote("b", loss_sum=math.nan)
        world.settle()
    assert verdicts(world) == [("b", Charge.NON_FINITE, True)]
    assert "Lower train.learning_rate" in world.events(ev.NodeQuarantined)[-1].reason
    goes_on_without(world, "b")


def test_losses_whose_sum_overflows_are_no_different() -> None:
    world = training("a", "b", "c", **LONG)
    for _ in range(ATTEMPTS):
        world.vote("c", loss_sum=1.7e308)
        world.settle()
    assert verdicts(world) == [("c", Charge.NON_FINITE, True)]
    assert world.exit_code is None


def vote_nan(world: World, spoiler: str) -> None:
    """All attempts at the next step, as long as they fail: every node of the plan votes NaN, if the ``spoiler`` is among them (or
    is empty). The second vote comes too late to abort the step, and counts all the same."""
    for _ in range(20):
        if isinstance(world.state.phase, Switching):
            world.settle()
        if world.exit_code is not None or not isinstance(world.state.phase, Stepping):
            return
        plan = world.plan_in_force
        if spoiler and spoiler not in plan.nodes:
            return
        for node in plan.nodes:
            world.vote(node, squared_gradient_norm=math.nan, generation=plan.generation)
    raise AssertionError("it goes on for ever")


def test_what_two_parties_report_is_tried_without_each_and_then_it_is_the_runs_own_fault() -> None:
    world = training("a", "b", "c", **LONG)
    vote_nan(world, spoiler="")
    assert verdicts(world) == []
    assert [benched.nodes for benched in world.events(ev.NodesBenched)] == [("c",), ("b",), ("a",)]
    failed = world.events(ev.RunFailed)[-1].reason
    assert "3 attempts in a row failed at step 1: NON_FINITE" in failed
    assert "Lower train.learning_rate" in failed
    assert world.refolded() == world.state.ledger


@pytest.mark.parametrize("spoiler", ["a", "b", "c"])
def test_who_makes_all_others_report_nan_is_found_by_trying_without_it(spoiler: str) -> None:
    world = training("a", "b", "c", "d", **LONG)
    world.step()
    vote_nan(world, spoiler)
    assert verdicts(world) == []
    assert spoiler in world.state.ledger.trust.benched
    world.step()
    assert verdicts(world) == [(spoiler, Charge.SPOILS, True)]
    assert set(world.events(ev.NodeQuarantined)[-1].against) >= {"abcd".replace(spoiler, "")[0]}
    assert set(world.state.members.sessions) == set("abcd") - {spoiler}
    assert not world.state.ledger.trust.benched
    goes_on_without(world, spoiler)


def test_who_reported_what_another_did_is_forgiven() -> None:
    world = training("a", "b", "c", "d", **LONG)
    for node in ("b", "b", "b", "c", "c"):
        world.fail_step(node, wire.NON_FINITE)
        world.settle()
    for _ in range(4):
        plan = set(world.plan_in_force.nodes)
        if "a" in plan:
            world.fail_step(min(plan - {"a"}), wire.NON_FINITE)
            world.settle()
    world.step()
    assert verdicts(world) == [("b", Charge.NON_FINITE, True), ("a", Charge.SPOILS, True)]
    assert [forgiven.node for forgiven in world.events(ev.NodeForgiven)] == ["b"]
    world.join("b", incarnation=2)


def test_if_no_plan_is_possible_without_anybody_it_waits_for_more_strangers_and_accuses_nobody() -> None:
    world = of_strangers("a", "b")
    vote_nan(world, spoiler="b")
    assert [benched.nodes for benched in world.events(ev.NodesBenched)] == [("b",), ("a",)]
    assert (world.exit_code, verdicts(world)) == (None, [])
    assert "to find who is at fault, the step is tried without a: 1 of 2 nodes are ready" in (
        world.events(ev.Waiting)[-1].reason
    )
    world.join("c")
    vote_nan(world, spoiler="b")
    world.step()
    assert verdicts(world) == [("b", Charge.SPOILS, True)]
    assert world.exit_code is None


def test_once_the_step_has_failed_without_each_of_them_one_goes_though_some_were_impossible_before() -> None:
    world = of_strangers("a", "b")
    vote_nan(world, spoiler="")
    world.join("c")
    vote_nan(world, spoiler="")
    assert world.exit_code is None
    assert verdicts(world)[0] == ("c", Charge.SPOILS, True)


@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_two_who_know_each_other_are_told_at_once_when_their_loss_is_nan(both: bool) -> None:
    """Whether both have said so, or the one who is first to know."""
    world = training("a", "b", **LONG)
    if both:
        vote_nan(world, spoiler="")
    else:
        fail_in_turn(world, *[("b", wire.NON_FINITE)] * ATTEMPTS)
    assert world.exit_code == 1
    assert "Lower train.learning_rate" in world.events(ev.RunFailed)[-1].reason
    assert world.state.ledger.trust.quarantined == {}
    assert world.refolded() == world.state.ledger


def needs(world: World, least: int, *nodes: str) -> None:
    """From now on no plan is possible with fewer nodes than ``least``, or without these."""
    able = world.planner
    world.planner = lambda ids: able(ids) if len(set(ids)) >= least and set(nodes) <= set(ids) else "too few"


def test_it_fails_only_once_it_is_tried_without_each_without_whom_it_can_be() -> None:
    world = training("a", "b", "c", **LONG)
    needs(world, 2, "c")
    vote_nan(world, spoiler="")
    assert [benched.nodes for benched in world.events(ev.NodesBenched)] == [("c",), ("b",), ("a",), ("c",)]
    assert world.state.ledger.trust.failed_without == ("b", "a")
    assert world.exit_code == 1


def test_it_does_not_fail_while_somebody_may_return() -> None:
    world = training(*"abc", **LONG)
    for node in "abab":
        world.fail_step(node, wire.NON_FINITE)
        if isinstance(world.state.phase, Switching):
            world.settle()
    world.lose("a")
    assert (world.state.ledger.trust.benched, world.exit_code) == (("b",), None)
    world.wait(GRACE_LEASES * LEASE / 2, beating="bc")
    assert world.exit_code is None
    world.wait(GRACE_LEASES * LEASE, beating="bc")
    assert world.exit_code == 1


def test_whom_no_plan_can_do_without_is_not_cleared_by_that() -> None:
    world = of_strangers("a", "b", "c")
    needs(world, 2, "c")
    vote_nan(world, spoiler="c")
    assert world.state.ledger.trust.benched == ("c",)
    assert (world.exit_code, verdicts(world)) == (None, [])


def test_another_node_lets_it_be_tried_without_whom_it_could_not_be_before() -> None:
    world = of_strangers("a", "b", "c")
    needs(world, 3, "a")
    vote_nan(world, spoiler="c")
    assert world.state.ledger.trust.benched == ("a",)
    world.join("d")
    vote_nan(world, spoiler="c")
    world.step()
    assert verdicts(world) == [("c", Charge.SPOILS, True)]


def test_a_trial_during_which_a_node_leaves_does_not_count() -> None:
    world = training(*"abcd", **LONG)
    world.step()
    for _ in range(2):
        for node in world.plan_in_force.nodes[:2]:
            world.fail_step(node, wire.NON_FINITE)
            world.settle()
    benched = world.state.ledger.trust.benched
    assert len(benched) == 1
    world.lose(min(set("abcd") - set(benched)))
    assert world.state.ledger.trust.benched == benched
    assert world.state.ledger.trust.failed_without == ()


def test_when_the_run_is_at_fault_who_was_suspended_for_its_nan_is_forgiven() -> None:
    world = training(*"abcd", **LONG)
    for _ in range(ATTEMPTS):
        world.fail_step("b", wire.NON_FINITE)
        world.settle()
    assert verdicts(world) == [("b", Charge.NON_FINITE, True)]
    vote_nan(world, spoiler="")
    assert world.exit_code == 1
    assert [forgiven.node for forgiven in world.events(ev.NodeForgiven)] == ["b"]
