"""An audit that is not settled proves nobody, shields nobody and accuses nobody; what it shows of rounding is learned."""

from __future__ import annotations

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.rounding import sort_of
from tests.coordinator.audit_scripts import auditor_of, quarantined
from tests.coordinator.core.auditing.test_learned_tolerance import BIAS, answer_about, audited_by, learned, others_say
from tests.coordinator.script import World


def audits_of_a(world: World) -> list[ev.WorkAudited]:
    return [event for event in world.events(ev.WorkAudited) if event.node == "a"]


def two_left() -> World:
    world = learned("a", "b", "c")
    world.lose("c")
    world.settle()
    return world


def test_between_two_what_is_unusual_counts_neither_for_a_node_nor_against_it() -> None:
    world = two_left()
    before = world.state.ledger.trust.audits["a"]
    others_say(world, "a", BIAS)
    assert world.state.ledger.trust.audits["a"] == before
    assert audits_of_a(world)[-1].tied
    assert not quarantined(world)
    assert world.refolded() == world.state.ledger


def test_but_how_far_apart_the_two_devices_are_is_learned() -> None:
    world = two_left()
    others_say(world, "a", BIAS)
    event = audits_of_a(world)[-1]
    rows = world.state.ledger.trust.rounding[sort_of("addends", event.codecs["addends"], event.kinds)]
    assert max(row.largest for row in rows) == BIAS


def test_a_friend_that_finds_it_right_where_as_many_find_it_wrong_proves_nothing() -> None:
    world = learned("a", "b", "c", "d")
    before = world.state.ledger.trust.audits["a"]
    audited_by(world, "a", "b")
    assert auditor_of(world, "a") == "b"
    answer_about(world, "a", {"b": BIAS, "c": BIAS, "d": 0.0})
    event = audits_of_a(world)[-1]
    assert (event.by, event.clean, event.tied) == ("d", False, True)
    assert world.state.ledger.trust.audits["a"].last_of["a"] < event.step
    assert world.state.ledger.trust.audits["a"].clean >= before.clean


def test_more_who_find_it_right_than_wrong_prove_it() -> None:
    world = learned("a", "b", "c", "d")
    audited_by(world, "a", "b")
    answer_about(world, "a", {"b": BIAS, "c": 0.0, "d": 0.0})
    event = audits_of_a(world)[-1]
    assert (event.clean, event.tied) == (True, False)
    assert world.state.ledger.trust.audits["a"].last_of["a"] == event.step


def test_people_are_told_that_nothing_was_settled() -> None:
    said = ev.WorkAudited(5, 2, "b", "a", 8, False, {"losses": 1e-4}, tied=True).narrate()
    assert said == "a did 8 micro-batches of b again in step 5, and it was not settled whether they are right"
