"""A node that fails is left out until it passes a test. It stays a member, and is told why. Nobody is accused of failing."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.core.timeouts import TEST_LEASES, pause_leases
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.health import LONGEST_PAUSE_LEASES
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import fail_in_turn, goes_on_without, of_strangers, verdicts
from tests.coordinator.script import LEASE, LONG, World, restarted, training

PROBLEMS = {
    wire.NON_FINITE: "Lower train.learning_rate",
    wire.OUT_OF_MEMORY: "Lower train.micro_batch, or add nodes",
    wire.INTERNAL: "scripted",
}


def out(world: World) -> set[str]:
    return set(world.state.ledger.ready) - set(world.state.ledger.working)


def timed(world: World, node: str) -> None:
    world.hear(node, timed=wire.Timed(flops=1e11))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_failing_node_is_left_out_immediately_stays_and_is_told_what_may_help(problem: wire.StepProblem) -> None:
    world = training(*"abcd", **LONG)
    world.fail_step("a", problem)
    assert out(world) == {"a"}
    assert "a" not in world.plan_in_force.nodes
    assert "a" in world.state.members.sessions
    told = [status.idle for status in world.told[world.streams["a"]] if status.HasField("idle")]
    assert PROBLEMS[problem] in told[-1]
    assert "tested" in told[-1]
    assert verdicts(world) == []
    world.settle()
    goes_on_without(world)


def test_it_is_tested_after_a_lease_and_planned_with_again() -> None:
    world = training(*"abcd", **LONG)
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.wait(0.9 * LEASE, beating="abcd")
    assert "test" not in world.kinds_to("a")
    world.wait(0.2 * LEASE, beating="abcd")
    assert "test" in world.kinds_to("a")
    assert out(world) == set()
    assert world.events(ev.NodeTested)[-1].node == "a"


def test_one_that_does_not_answer_its_test_has_failed_again_and_pauses_double_up_to_an_hour() -> None:
    world = training(*"abcd", **LONG)
    world.automatic_tests = False
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.wait((1 + TEST_LEASES) * LEASE + LEASE, beating="abcd")
    again = world.events(ev.NodeOutOfUse)[-1]
    assert (again.node, again.seconds) == ("a", 2 * LEASE)
    assert "did not answer a test" in again.reason
    assert [pause_leases(times) for times in (1, 2, 3, 4, 40)] == [1, 2, 4, 8, LONGEST_PAUSE_LEASES]


def test_a_commit_in_which_it_takes_part_ends_the_matter_and_so_does_another_process_of_the_node() -> None:
    world = training(*"abcd", **LONG)
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.wait(1.2 * LEASE, beating="abcd")
    assert world.state.ledger.health["a"].failures == 1
    for _ in range(4):
        if isinstance(world.state.phase, Switching):
            world.settle()
        world.step()
        if isinstance(world.state.phase, Pausing):
            world.apply()
    assert "a" in world.plan_in_force.nodes
    assert dict(world.state.ledger.health) == {}
    world.automatic_tests = False
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.lose("a")
    world.join("a", incarnation=1)
    assert out(world) == {"a"}, "the same process"
    world.lose("a")
    world.join("a", incarnation=2)
    assert out(world) == set()


def test_who_is_out_of_use_is_so_after_a_restart_of_the_coordinator() -> None:
    world = training(*"abcd", **LONG)
    world.automatic_tests = False
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.step()
    again = restarted(world, **LONG, cluster={"nodes": 4})
    again.automatic_tests = False
    again.join(*"abcd")
    assert out(again) == {"a"}
    assert world.refolded() == world.state.ledger


def test_if_nobody_can_take_its_place_the_run_waits_says_so_and_tests_it_at_once() -> None:
    world = training("a", "b", **LONG)
    world.automatic_tests = False
    world.fail_step("b", wire.OUT_OF_MEMORY)
    assert isinstance(world.state.phase, Gathering)
    assert "out of use until they pass a test, which comes by itself: b (" in world.events(ev.Waiting)[-1].reason
    assert "test" in world.kinds_to("b")
    timed(world, "b")
    assert isinstance(world.state.phase, Switching)
    world.settle()
    goes_on_without(world)


def test_the_second_time_the_run_waits_for_the_pause() -> None:
    world = training("a", "b", **LONG)
    world.fail_step("b", wire.OUT_OF_MEMORY)
    world.settle()
    world.fail_step("b", wire.OUT_OF_MEMORY)
    assert isinstance(world.state.phase, Gathering)
    world.wait(2.2 * LEASE, beating="ab")
    assert isinstance(world.state.phase, Switching)


def test_strangers_who_fail_are_left_out_and_nobody_else() -> None:
    world = of_strangers(*"abcdkl")
    world.automatic_tests = False
    fail_in_turn(world, ("k", wire.OUT_OF_MEMORY), ("l", wire.OUT_OF_MEMORY))
    assert out(world) == {"k", "l"}
    assert verdicts(world) == []
    goes_on_without(world)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_if_two_parties_fail_in_the_same_way_a_run_of_people_who_know_each_other_ends(
    problem: wire.StepProblem,
) -> None:
    world = training(*"ab", **LONG)
    while world.exit_code is None:
        for node in "ab":
            if isinstance(world.state.phase, Gathering):
                world.wait(5 * LEASE, beating="ab")
            if isinstance(world.state.phase, Switching):
                world.settle()
            world.fail_step(node, problem)
    assert world.exit_code == 1
    assert PROBLEMS[problem] in world.events(ev.RunFailed)[-1].reason
    assert verdicts(world) == []


def test_if_they_fail_in_other_ways_it_goes_on() -> None:
    world = training(*"abcdef", **LONG)
    fail_in_turn(world, *[("a", wire.NON_FINITE), ("b", wire.OUT_OF_MEMORY)])
    assert (world.exit_code, verdicts(world)) == (None, [])


@pytest.mark.parametrize("fault", ["NaN", "plans"])
def test_a_stranger_that_is_left_alone_cannot_end_the_run(fault: str) -> None:
    world = of_strangers("a", "b", "c", stages=1)
    world.step()
    for node in "ac":
        world.lose(node)
    world.wait(20 * LEASE, beating="b")  # it goes on alone, from the start
    for _ in range(ATTEMPTS):
        if isinstance(world.state.phase, Gathering):
            world.wait(10 * LEASE, beating="b")
        if fault == "NaN":
            world.settle()
            world.vote("b", loss_sum=math.nan)
        else:
            world.fail_plan("b")
    assert world.exit_code is None
    assert verdicts(world) == []


def test_who_goes_on_alone_with_a_run_of_people_who_know_each_other_is_told_what_is_wrong() -> None:
    changes = {**LONG, "cluster": {"nodes": 2, "stages": 1}}
    before = training("a", "b", **changes)
    before.step()
    world = restarted(before, **changes)
    world.join("b")
    world.wait(20 * LEASE, beating="b")
    for _ in range(ATTEMPTS):
        if isinstance(world.state.phase, Gathering):
            world.wait(10 * LEASE, beating="b")
        world.settle()
        world.vote("b", loss_sum=math.nan)
    assert world.exit_code == 1
    assert "NaN or infinite" in world.events(ev.RunFailed)[-1].reason


def test_if_all_belong_to_one_party_three_attempts_that_plans_found_no_way_round_end_the_run() -> None:
    """As with data that make the loss NaN, wherever they are computed."""
    world = training("a", "b", **LONG)
    world.belong_together("a", "b")
    for _ in range(ATTEMPTS):
        assert world.exit_code is None
        if isinstance(world.state.phase, Gathering):
            world.wait(5 * LEASE, beating="ab")
        if isinstance(world.state.phase, Switching):
            world.settle()
        world.fail_step("b", wire.NON_FINITE)
    assert world.exit_code == 1
    assert "Lower train.learning_rate" in world.events(ev.RunFailed)[-1].reason


def test_who_cannot_take_its_part_is_left_out_and_the_others_go_on() -> None:
    world = World()
    world.join("a", "b", "c")
    world.automatic_tests = False
    world.fail_plan("b", "no memory")
    assert out(world) == {"b"}
    world.settle()
    goes_on_without(world)


def test_an_idle_node_cannot_fail_a_plan() -> None:
    world = World(planner=lambda ids: training("a", "b").plan_in_force if {"a", "b"} <= set(ids) else "too few")
    world.join("a", "b", "c")
    for _ in range(5):
        world.fail_plan("c")
        world.fail_plan("c", lost=[0])
    assert world.events(ev.PlanFailed) == []
    goes_on_without(world)


def test_a_sender_of_nan_is_kept_apart_from_its_accuser_and_goes_when_enough_accuse_it() -> None:
    world = of_strangers(*"abcdefg", stages=1)
    for node in "bcd":
        assert verdicts(world) == []
        world.fail_step(node, wire.NON_FINITE, peer="a")
        if node != "d":
            world.settle()
            assert ("a", node) in kept_apart(world.state.ledger)
    assert verdicts(world) == [("a", Charge.HOP, True)]
    goes_on_without(world, "a")


def test_who_names_the_sender_of_nan_to_which_it_has_no_link_has_failed_itself() -> None:
    world = training(*"abcd", **LONG)
    world.fail_step("a", wire.NON_FINITE, peer="nobody")
    assert world.events(ev.Suspected) == []
    assert out(world) == {"a"}
    assert not isinstance(world.state.phase, Stepping)
