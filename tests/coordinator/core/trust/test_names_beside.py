"""Several names of one key are one party: what one of them withholds or hands out counts for all, and hides none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.answers import states_of
from tests.coordinator.audit_scripts import all_vote, answer_all, asked, auditing, squares
from tests.coordinator.script import LAYERS, LONG, World, fresh_state


def test_nobody_audits_its_own_party() -> None:
    world = auditing("a", "b", "c", "d", planner=squares, one_key="ab")
    all_vote(world)
    assert asked(world) == {"c": ["d"], "d": ["c"]}


def two_names_in_a_row() -> World:
    """One key has a, of the first stage, and d, of the second, which gets its micro-batches from a."""
    return auditing(*"abcdef", planner=squares, one_key="ad")


@pytest.mark.parametrize("unreachable", [False, True])
def test_a_step_counts_for_nothing_if_the_party_hands_out_nothing_beside_its_own_work_though_it_seems_to_hang(
    unreachable: bool,
) -> None:
    world = two_names_in_a_row()
    for _ in range(ATTEMPTS):
        assert kept_apart(world.state.ledger) == frozenset()
        answer_all(world, of="d", withheld_by="a", problem="WITHHELD", unreachable=unreachable)
        if isinstance(world.state.phase, Switching):
            world.settle()
    assert world.state.ledger.training.step == 0
    assert {event.problem for event in world.events(ev.StepAborted)} == {"UNAUDITED"}
    assert world.events(ev.NodeQuarantined)[-1].node == "d", "two auditors have said so ATTEMPTS times"


def test_a_party_is_audited_though_it_says_that_its_own_name_beside_kept_nothing() -> None:
    world = two_names_in_a_row()
    for node in world.plan_in_force.nodes:
        world.vote(node, kept=node != "a")
    assert "d" in asked(world)


def test_what_is_due_of_one_name_is_not_settled_by_an_audit_of_another_beside_it_in_the_plan() -> None:
    world = auditing("a", "b", "c", one_key="ab")
    world.state = replace(world.state, auditing=replace(world.state.auditing, due={"a": 0, "gone": 0}))
    world.belong_together("gone")
    answer_all(world, of="a", problem="no memory")
    assert world.state.auditing.due.keys() == {"a"}, "a name outside the plan is not due"
    answer_all(world)
    assert not world.state.auditing.due


def test_sums_are_done_again_though_another_name_of_their_owners_key_kept_nothing() -> None:
    world = auditing("a", "b", "c", one_key="ab")
    for node in world.plan_in_force.nodes:
        world.vote(node, kept=node != "b")
    phase = world.state.phase
    assert isinstance(phase, Stepping)
    assert [len(audit.order.sums) for audit in phase.audits if audit.order.node == "a"] == [1]


def with_both_names_in_the_first_stage(nodes: Iterable[str]) -> Plan:
    """One key has m1 and m2. They train the first stage, with x as soon as x has joined. b trains the second."""
    first = [name for name in sorted(nodes) if name != "b"]
    ways = [(first[number % len(first)], "b") for number in range(4)]
    stages = [Stage((0, 2), tuple(first), ()), Stage((2, LAYERS), ("b",), ())]
    return from_routes(0, stages, [(way, ways.count(way)) for way in dict.fromkeys(ways)])


@pytest.mark.parametrize("mode", ["trusted", "open"])
def test_who_gets_other_state_from_either_name_of_the_only_party_that_has_it_is_one_against_one(mode: str) -> None:
    tables = {**LONG, "cluster": {"nodes": 3, "stages": "auto"}, "trust": {"mode": mode}}
    world = World(fresh_state(**tables), with_both_names_in_the_first_stage)
    for name in "bx":
        world.belong_together(name, key=f"key of {name}")
    world.belong_together("m1", "m2")
    world.join("b", "m1", "m2")
    world.settle()
    world.step()
    world.join("x")
    world.step()
    world.apply()
    for _ in range(ATTEMPTS):
        assert "x" in world.plan_in_force.nodes
        others = states_of(world.plan_in_force, "x", b"another state".ljust(32), ["m1", "m2"])
        for node in ("m1", "m2", "b"):
            world.plan_ready(node)
        world.plan_ready("x", states=others)
        if "x" not in world.plan_in_force.nodes:
            break
    assert [event.node for event in world.events(ev.NodeQuarantined)] == ["x"], "it came last"
