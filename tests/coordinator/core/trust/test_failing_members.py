"""Who lacks memory or cannot take its part is left out, and whoever remains goes on or waits for others."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core.state import ATTEMPTS, Gathering, Stepping, Switching
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import (
    fail_in_turn,
    goes_on_without,
    of_strangers,
    verdicts,
)
from tests.coordinator.script import LEASE, LONG, World, restarted, training


def test_only_if_two_parties_lack_memory_the_run_ends_for_that() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.NON_FINITE), ("b", wire.OUT_OF_MEMORY)] * 2)
    assert (world.exit_code, len(world.state.ledger.trust.benched)) == (None, 1)
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.OUT_OF_MEMORY), ("b", wire.OUT_OF_MEMORY)] * 2)
    assert world.exit_code == 1
    assert "Lower train.micro_batch" in world.events(ev.RunFailed)[-1].reason


def test_two_strangers_who_lack_memory_are_suspended_and_the_others_go_on() -> None:
    world = of_strangers(*"abcdkl")
    fail_in_turn(world, *[("k", wire.OUT_OF_MEMORY), ("l", wire.OUT_OF_MEMORY)] * 2)
    assert verdicts(world) == [("k", Charge.OUT_OF_MEMORY, True), ("l", Charge.OUT_OF_MEMORY, True)]
    goes_on_without(world, "k", "l")


def test_what_two_said_before_they_were_suspended_for_it_counts_against_nobody_else() -> None:
    world = of_strangers(*"abcdkl")
    fail_in_turn(world, *[("k", wire.OUT_OF_MEMORY), ("l", wire.OUT_OF_MEMORY)] * 2)
    world.settle()
    fail_in_turn(world, ("a", wire.OUT_OF_MEMORY), ("a", wire.OUT_OF_MEMORY))
    assert world.state.ledger.trust.benched == ()
    goes_on_without(world, "k", "l")


def test_two_strangers_who_cannot_take_their_parts_are_suspended_and_the_others_go_on() -> None:
    world = of_strangers(*"abcdkl", stages=1)
    world.step()
    world.fail_step("a", wire.INTERNAL)
    for node in "klkl":
        world.fail_plan(node)
    assert verdicts(world) == [("k", Charge.PLAN_FAILED, True), ("l", Charge.PLAN_FAILED, True)]
    assert world.state.ledger.trust.plan_failures == ()
    goes_on_without(world, "k", "l")


@pytest.mark.parametrize("fault", ["memory", "plans"])
def test_where_it_is_too_much_for_all_strangers_the_run_waits_and_says_so(fault: str) -> None:
    world = of_strangers(*"abcd", stages=1)
    while world.state.ledger.ready:
        if fault == "plans" and isinstance(world.state.phase, Stepping):
            world.fail_step(world.plan_in_force.nodes[0], wire.INTERNAL)
        elif fault == "memory" and isinstance(world.state.phase, Switching):
            world.settle()
        for node in world.plan_in_force.nodes[:2]:
            if fault == "plans":
                world.fail_plan(node, "no memory")
            elif isinstance(world.state.phase, Stepping):
                fail_in_turn(world, (node, wire.OUT_OF_MEMORY))
    assert world.exit_code is None
    assert {undecided for _, _, undecided in verdicts(world)[:2]} == {True}
    said = world.events(ev.Waiting)[-1].reason
    assert "0 of " in said
    assert ("Lower train.micro_batch, or add nodes" if fault == "memory" else "no memory") in said


def test_if_nobody_can_take_its_place_the_run_waits_and_says_for_whom() -> None:
    world = training("a", "b", **LONG)
    for _ in range(ATTEMPTS):
        world.fail_step("b", wire.OUT_OF_MEMORY)
        if isinstance(world.state.phase, Switching):
            world.settle()
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
    assert "Lower train.learning_rate" in world.events(ev.RunFailed)[-1].reason


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
