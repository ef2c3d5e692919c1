"""What nodes hold is compared before they train on it: `core/copies/same_state.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.standing import Standing, earned
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.answers import DIGEST, states_of
from tests.coordinator.audit_scripts import quarantined, replicas
from tests.coordinator.script import LAYERS, LONG, World, fresh_state, refusal_of

WRONG = b"another state".ljust(32)


def handing_over(old: Iterable[str], new: Iterable[str], steps: int = 1, **changes: dict[str, Any]) -> World:
    """The ``new`` nodes are to get their state from the ``old`` ones, after this number of steps."""
    names = list(old)
    changes = {**LONG, "cluster": {"nodes": len(names), "stages": 1}, **changes}
    world = World(fresh_state(**changes), planner=replicas)
    for node in (*names, *new):
        world.belong_together(node, key=f"key of {node}")
    world.join(*names)
    world.settle()
    for _ in range(steps - 1):
        world.step()
    world.join(*new)
    world.step()
    if not world.last_to(names[0], "commit").pause:
        world.step()  # newcomers were to copy the state before that
    world.apply()
    assert isinstance(world.state.phase, Switching)
    return world


def say(world: World, nodes: Iterable[str], digest: bytes = DIGEST, donors: Iterable[str] = ()) -> None:
    for node in nodes:
        world.plan_ready(node, states=states_of(world.plan_in_force, node, digest, donors))


def doubted(world: World) -> list[tuple[str, ...]]:
    """The nodes that had other state, each with the donors that it names."""
    return [event.nodes for event in world.events(ev.Suspected) if event.charge is Charge.STATE]


def test_who_gets_wrong_state_is_not_accused_and_gets_it_from_another() -> None:
    world = handing_over("ab", "c")
    say(world, "ab")
    say(world, "c", WRONG, ["a"])
    assert doubted(world) == [("c", "a")]
    assert kept_apart(world.state.ledger) == {("a", "c")}
    assert world.state.ledger.training.generation == 3, "the plan comes again"
    assert world.donors_to("c") == [["b"]] * LAYERS
    assert world.donors_to("a") == [["a", "b"]] * LAYERS, "where the state is expected stays known"
    say(world, "ab")
    say(world, "c", donors=["b"])
    assert isinstance(world.state.phase, Stepping)
    assert quarantined(world) == []


def test_standbys_do_not_copy_from_a_node_in_doubt_about_state_if_there_is_another() -> None:
    world = handing_over("ab", "c")
    say(world, "ab")
    say(world, "c", WRONG, ["a"])
    say(world, "ab")
    say(world, "c", donors=["b"])
    world.join("d")
    assert {name for donors in world.last_to("d", "standby").donors for name in donors.nodes} == {"b"}


def test_of_whom_two_say_that_it_handed_out_wrong_state_is_quarantined() -> None:
    world = handing_over("ab", "cd")
    say(world, "ab")
    say(world, "c", WRONG, ["a"])
    say(world, "d", WRONG, ["a"])
    assert quarantined(world) == [("a", Charge.STATE, True)], "they may have agreed on it"
    assert world.plan_in_force.nodes == ("b", "c", "d")
    assert world.donors_to("c") == [["b"]] * LAYERS


def test_two_names_of_one_party_count_as_one() -> None:
    world = handing_over("ab", "cd")
    world.belong_together("c", "d")
    say(world, "ab")
    say(world, "c", WRONG, ["a"])
    say(world, "d", WRONG, ["a"])
    assert quarantined(world) == []


def test_a_node_with_wrong_state_from_every_donor_is_quarantined() -> None:
    world = handing_over("ab", "c")
    for donor in "ab":
        assert quarantined(world) == []
        say(world, "ab")
        say(world, "c", WRONG, [donor])
    assert quarantined(world) == [("c", Charge.STATE, True)]
    assert world.plan_in_force.nodes == ("a", "b")
    assert not world.events(ev.RolledBack)


def test_word_against_word_the_newcomer_goes_where_no_plan_does_without_the_two() -> None:
    world = handing_over("a", "c")
    for _ in range(2):
        say(world, "a")
        say(world, "c", WRONG, ["a"])
    assert quarantined(world) == [("c", Charge.STATE, True)]


@pytest.mark.parametrize("donors", [[], ["nobody"], ["c"], ["d"]])
def test_wrong_state_that_no_named_donor_gave_is_the_nodes_own_fault(donors: list[str]) -> None:
    world = handing_over("ab", "cd")
    for _ in range(ATTEMPTS):
        assert quarantined(world) == []
        say(world, "ab")
        say(world, "d", donors=["a"])
        say(world, "c", WRONG, donors)
    assert quarantined(world) == [("c", Charge.DIGEST, False)]


def test_a_donor_that_has_left_since_it_was_named_is_still_believed_to_have_given_it() -> None:
    world = handed_on()
    world.lose("a")
    say(world, "c", WRONG, ["a"])
    assert doubted(world) == [("c", "a")]
    assert quarantined(world) == []


def test_a_node_refuses_one_bucket_at_a_time_whatever_it_says_of_the_others() -> None:
    world = handing_over("abd", "c")
    say(world, "abd")
    given = [["a", "b"], ["a", "d"], ["b"], ["d"]]
    states = [wire.BucketState(bucket=bucket, digest=WRONG, donors=donors) for bucket, donors in enumerate(given)]
    world.plan_ready("c", states=states)
    assert doubted(world) == [("c", "b")], "the first that says which one it was"


def test_two_newcomers_who_accuse_one_after_the_other_are_gone_before_any_of_them() -> None:
    world = handing_over("abcd", ["k1", "k2"], trust={"mode": "open"})
    targets = iter("abcd")
    while isinstance(world.state.phase, Switching) and {"k1", "k2"} & set(world.plan_in_force.nodes):
        target = next(targets)
        say(world, set("abcd") & set(world.plan_in_force.nodes))
        say(world, ["k1", "k2"], WRONG, [target])
    assert {node for node, *_ in quarantined(world)} == {"k1", "k2"}


def test_newcomers_are_not_heard_against_a_node_that_has_earned_more() -> None:
    world = handing_over("abd", ["k1", "k2"], trust={"mode": "open", "audit_rate": 1.0}, steps=5)
    assert earned(world.state.ledger, "a").standing is Standing.PROVEN
    say(world, "abd")
    say(world, ["k1", "k2"], WRONG, ["a"])
    assert quarantined(world) == []
    assert world.donors_to("k1") == [["b", "d"]] * LAYERS


def broken_off() -> World:
    """c has wrong state that it got partly from a and partly from b."""
    world = handing_over("ab", "c")
    say(world, "ab")
    say(world, "c", WRONG, ["a", "b"])
    return world


def test_of_whom_a_donor_broke_off_is_not_accused_and_says_next_time_which_it_was() -> None:
    world = broken_off()
    assert quarantined(world) == []
    [one] = {tuple(names) for names in world.donors_to("c")}
    assert len(one) == 1, "it is named one alone"
    say(world, "ab")
    say(world, "c", WRONG, one)
    assert quarantined(world) == []
    [other] = {tuple(names) for names in world.donors_to("c")}
    assert {*one, *other} == {"a", "b"}
    say(world, "ab")
    say(world, "c", donors=other)
    assert isinstance(world.state.phase, Stepping)


def test_who_is_named_one_donor_alone_is_named_another_when_that_one_gives_nothing() -> None:
    world = broken_off()
    [one] = {tuple(names) for names in world.donors_to("c")}
    world.fail_plan("c", f"bucket 0 could not be fetched: {one[0]} ended after 1 of 4 bytes")
    [other] = {tuple(names) for names in world.donors_to("c")}
    assert {*one, *other} == {"a", "b"}


def test_the_majority_of_nodes_that_trained_the_state_decides() -> None:
    world = handing_over("abc", "d")
    say(world, "ab")
    say(world, "c", WRONG)
    say(world, "d", WRONG, ["c"])
    assert [event[0] for event in quarantined(world)] == ["c"]
    assert not world.events(ev.RolledBack)
    assert doubted(world) == [], "what it got from c is no news"


def test_who_trained_the_state_and_names_donors_vouches_all_the_same() -> None:
    world = handing_over("abc", "d")
    say(world, "ab")
    say(world, "c", WRONG, ["a"])
    say(world, "d", donors=["a"])
    assert [event[0] for event in quarantined(world)] == ["c"]
    assert doubted(world) == []


def handed_on() -> World:
    """Stage (0, 2) goes from a and b to c, which alone trains it after step 1."""

    def plan(ids: Iterable[str]) -> Plan:
        first = ("c",) if "c" in ids else ("a", "b")
        return from_routes(0, [Stage((0, LAYERS), first, ())], [((name,), 4 // len(first)) for name in first])

    world = World(fresh_state(cluster={"nodes": 2, "stages": 1}, train={"steps": 9}), planner=plan)
    world.join("a", "b")
    world.settle()
    world.join("c")
    world.step()
    plan_before = world.plan_in_force
    for node in "ab":
        states = states_of(plan_before, node)
        applied = wire.Applied(generation=1, step=1, state_digest=DIGEST, states=states)
        world.hear(node, applied=applied)
    assert world.plan_in_force.nodes == ("c",)
    return world


def test_nodes_that_hand_all_state_on_vouch_by_the_state_they_had_at_the_pause() -> None:
    world = handed_on()
    say(world, "c", WRONG, ["a"])
    assert doubted(world) == [("c", "a")]
    assert world.donors_to("c") == [["b"]] * LAYERS
    say(world, "c", donors=["b"])
    assert isinstance(world.state.phase, Stepping)


def test_those_without_a_part_vouch_when_they_hear_of_the_plan() -> None:
    world = handed_on()
    phase = world.state.phase
    assert isinstance(phase, Switching)
    world.state = replace(world.state, phase=replace(phase, states={}))  # as when a node was lost, and nobody paused
    states = [wire.BucketState(bucket=layer, digest=DIGEST) for layer in range(LAYERS)]
    world.plan_ready("b", states=states)
    say(world, "c", WRONG, ["a"])
    assert doubted(world) == [("c", "a")]


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.pop(),
        lambda states: states.append(states[0]),
        lambda states: states.append(wire.BucketState(bucket=99, digest=DIGEST)),
        lambda states: states[0].ClearField("digest"),
    ],
)
def test_a_node_must_say_what_it_holds_of_each_bucket_of_its_stage_once(change) -> None:  # type: ignore[no-untyped-def]
    world = handing_over("ab", "c")
    states = states_of(world.plan_in_force, "c")
    change(states)
    stream = world.streams["c"]
    world.plan_ready("c", states=states)
    assert "states" in refusal_of(world, stream).sentence
