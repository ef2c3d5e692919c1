"""Who fails by itself in three attempts is left out. Among people who know each other the run ends if several fail alike."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core.phases import Gathering, Stepping, Switching
from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import fail_in_turn, goes_on_without, of_strangers, verdicts
from tests.coordinator.script import LEASE, LONG, World, restarted, training

PROBLEMS = {
    wire.NON_FINITE: (Charge.NON_FINITE, "Lower train.learning_rate"),
    wire.OUT_OF_MEMORY: (Charge.OUT_OF_MEMORY, "Lower train.micro_batch, or add nodes"),
    wire.INTERNAL: (Charge.STEP_FAILED, "scripted"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_who_fails_alone_in_three_attempts_is_left_out_and_told_what_may_help(problem: wire.StepProblem) -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", problem)] * ATTEMPTS)
    charge, advice = PROBLEMS[problem]
    assert verdicts(world) == [("a", charge, problem == wire.NON_FINITE)]
    assert advice in world.events(ev.NodeQuarantined)[-1].reason
    goes_on_without(world, "a")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_if_two_parties_fail_in_the_same_way_a_run_of_people_who_know_each_other_ends(
    problem: wire.StepProblem,
) -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", problem), ("b", problem)] * 2)
    assert world.exit_code == 1
    assert PROBLEMS[problem][1] in world.events(ev.RunFailed)[-1].reason
    assert verdicts(world) == []


def test_what_befell_one_that_has_left_since_does_not_count() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("d", wire.OUT_OF_MEMORY)] * 2)
    world.lose("d", "goodbye: its owner gives up")
    world.settle()
    for _ in range(3):
        world.step()
    world.apply()
    world.settle()
    fail_in_turn(world, *[("c", wire.OUT_OF_MEMORY)] * 2)
    assert world.exit_code is None
    fail_in_turn(world, ("c", wire.OUT_OF_MEMORY))
    assert [node for node, *_ in verdicts(world)] == ["c"]


def test_if_they_fail_in_other_ways_it_goes_on() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.NON_FINITE), ("b", wire.OUT_OF_MEMORY)] * 2)
    assert (world.exit_code, verdicts(world)) == (None, [])


def test_whoever_was_left_out_for_what_the_run_is_to_blame_for_is_cleared() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.NON_FINITE)] * ATTEMPTS)
    for node in "bcbc":
        if isinstance(world.state.phase, Switching):
            world.settle()
        fail_in_turn(world, (node, wire.NON_FINITE))
    assert world.exit_code == 1
    assert world.state.ledger.trust.quarantined == {}


def test_strangers_who_fail_go_and_nobody_else_is_held_to_what_they_said() -> None:
    world = of_strangers(*"abcdkl")
    fail_in_turn(world, *[("k", wire.OUT_OF_MEMORY), ("l", wire.OUT_OF_MEMORY)] * ATTEMPTS)
    assert {node for node, _, _ in verdicts(world)} == {"k", "l"}
    assert world.state.ledger.trust.suspicions == ()
    goes_on_without(world, "k", "l")


def test_where_it_is_too_much_for_all_strangers_the_run_waits_and_says_so() -> None:
    world = of_strangers(*"abcd", stages=1)
    for _ in range(20):
        if isinstance(world.state.phase, Switching):
            world.settle()
        if isinstance(world.state.phase, Stepping):
            fail_in_turn(world, (world.plan_in_force.nodes[0], wire.OUT_OF_MEMORY))
    assert world.state.ledger.ready == ()
    assert world.exit_code is None
    said = world.events(ev.Waiting)[-1].reason
    assert "0 of " in said
    assert "Lower train.micro_batch, or add nodes" in said


def test_if_nobody_can_take_its_place_the_run_waits_and_says_for_whom() -> None:
    world = training("a", "b", **LONG)
    fail_in_turn(world, *[("b", wire.OUT_OF_MEMORY)] * ATTEMPTS)
    assert verdicts(world) == [("b", Charge.OUT_OF_MEMORY, False)]
    assert world.exit_code is None
    assert isinstance(world.state.phase, Gathering)
    said = world.events(ev.Waiting)[-1].reason
    assert "1 of 2 nodes are ready; quarantined: b (`dtfm-coordinator forgive NODE` lets one come back)" in said


@pytest.mark.parametrize("fault", ["NaN", "plans"])
def test_a_stranger_that_is_left_alone_cannot_end_the_run(fault: str) -> None:
    world = of_strangers("a", "b", "c", stages=1)
    world.step()
    for node in "ac":
        world.lose(node)
    world.wait(20 * LEASE, beating="b")  # it goes on alone, from the start
    for _ in range(ATTEMPTS):
        if fault == "NaN":
            world.settle()
            world.vote("b", loss_sum=math.nan)
        else:
            world.fail_plan("b")
    assert [why.node for why in world.events(ev.NodeQuarantined)] == ["b"]
    assert world.exit_code is None
    world.join("a", "c", incarnation=2)
    world.settle()
    goes_on_without(world, "b")


def test_who_goes_on_alone_with_a_run_of_people_who_know_each_other_is_told_what_is_wrong() -> None:
    changes = {**LONG, "cluster": {"nodes": 2, "stages": 1}}
    before = training("a", "b", **changes)
    before.step()
    world = restarted(before, **changes)
    world.join("b")
    world.wait(20 * LEASE, beating="b")
    for _ in range(ATTEMPTS):
        world.settle()
        world.vote("b", loss_sum=math.nan)
    assert world.exit_code == 1
    assert "NaN or infinite" in world.events(ev.RunFailed)[-1].reason


def test_who_cannot_take_its_part_three_times_is_left_out() -> None:
    world = World()
    world.join("a", "b", "c")
    for _ in range(ATTEMPTS):
        world.fail_plan("b", "no memory")
    assert verdicts(world) == [("b", Charge.PLAN_FAILED, False)]
    goes_on_without(world, "b")


def test_an_idle_node_cannot_fail_a_plan() -> None:
    world = World(planner=lambda ids: training("a", "b").plan_in_force if {"a", "b"} <= set(ids) else "too few")
    world.join("a", "b", "c")
    for _ in range(5):
        world.fail_plan("c")
        world.fail_plan("c", lost=[0])
    assert world.events(ev.PlanFailed) == []
    goes_on_without(world)


def test_a_failure_counts_until_the_next_commit_and_through_a_restart() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.INTERNAL)] * (ATTEMPTS - 1))
    again = restarted(world, **LONG, cluster={"nodes": 4})
    again.join(*"abcd")
    again.settle()
    fail_in_turn(again, ("a", wire.INTERNAL))
    assert verdicts(again) == [("a", Charge.STEP_FAILED, False)]
    world.step()
    fail_in_turn(world, *[("a", wire.INTERNAL)] * (ATTEMPTS - 1))
    assert verdicts(world) == []


def test_who_sends_nan_is_kept_apart_from_whoever_says_so_and_goes_when_enough_do() -> None:
    world = of_strangers(*"abcdefg", stages=1)
    for node in "bcd":
        assert verdicts(world) == []
        world.fail_step(node, wire.NON_FINITE, peer="a")
        if node != "d":
            world.settle()
            assert ("a", node) in kept_apart(world.state.ledger)
    assert verdicts(world) == [("a", Charge.HOP, True)]
    goes_on_without(world, "a")


def test_who_names_the_sender_of_nan_to_which_it_has_no_link_accuses_itself() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, ("a", wire.NON_FINITE))
    world.fail_step("a", wire.NON_FINITE, peer="nobody")
    assert [each.nodes for each in world.events(ev.Suspected)] == [("a",), ("a",)]
