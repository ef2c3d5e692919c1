"""Who leaves, fails or breaks its streams to end an audit that goes against it has a strike; who does so by accident has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.trust.strikes import Record, Strike
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audit_scripts import (
    ASKED_IN_VAIN,
    all_vote,
    asked,
    asked_for,
    auditing,
    auditor_of,
    come_back,
    quarantined,
    trains_again,
)
from tests.coordinator.honest_work import audited
from tests.coordinator.script import World


def found_wrong(world: World, node: str) -> str:
    """Its first auditor says so; nobody else is asked yet. Returns who that is."""
    all_vote(world)
    asked_for(world, node)
    by = auditor_of(world, node)
    world.audit(by, addends=2.0)
    return by


def ends(world: World, node: str, how: str, lost: str) -> None:
    """The node ends the step in hand."""
    match how:
        case "it leaves":
            world.lose(node)
        case "it fails":
            world.fail_step(node, wire.INTERNAL)
        case "it loses another":
            world.fail_step(node, wire.PEER_LOST, peer=lost)


@pytest.mark.parametrize("how", ["it leaves", "it fails", "it loses another"])
def test_who_ends_the_step_once_its_work_is_found_wrong_has_a_strike(how: str) -> None:
    world = auditing("a", "b", "c", "d")
    for times in range(1, 4):
        assert not quarantined(world)
        by = found_wrong(world, "c")
        ends(world, "c", how, lost=next(iter({"a", "b", "d"} - {by})))
        assert world.state.ledger.training.step < times * 10, "the step was not committed"
        assert world.state.auditing.withheld["c", "c"].attempts == times
        assert world.state.auditing.withheld["c", "c"].strikes[-1].by == (by,)
        if times < 3:
            come_back(world, "c")
            world.automatic_audits = False
    trains_again(world)
    all_vote(world)
    assert {(node, charge) for node, charge, _ in quarantined(world)} == {("c", Charge.WITHHELD)}
    (reason,) = [event.reason for event in world.events(ev.NodeQuarantined)]
    assert "it ended the step when" in reason
    assert "withheld" not in reason


@pytest.mark.parametrize("how", ["it leaves", "it fails", "it loses another"])
@pytest.mark.parametrize("who", ["the auditor", "a third"])
def test_who_is_accused_and_did_not_end_the_step_has_no_strike_and_is_audited_in_the_next(who: str, how: str) -> None:
    """Else a false auditor ends the step itself before others are asked, or lets a friend do so."""
    world = auditing("a", "b", "c", "d")
    by = found_wrong(world, "c")
    third = next(iter({"a", "b", "d"} - {by}))
    ends(world, by if who == "the auditor" else third, how, lost="c")
    assert world.state.ledger.training.step == 0, "the step was not committed"
    assert not world.state.auditing.withheld
    trains_again(world)
    all_vote(world)
    assert "c" in asked(world)


def test_an_auditor_that_breaks_its_stream_to_the_node_that_it_accuses_brings_no_strike_upon_it() -> None:
    """The accused says truly that it has lost that one. Neither what was said before counts nor what is said later."""
    for later in (False, True):
        world = auditing("a", "b", "c", "d")
        all_vote(world)
        asked_for(world, "c")
        by = auditor_of(world, "c")
        order = world.last_to(by, "audit")
        if not later:
            world.audit(by, addends=2.0)
        world.fail_step("c", wire.PEER_LOST, peer=by)
        if later:
            world.hear(by, audited(order, **ASKED_IN_VAIN))
        assert not world.state.auditing.withheld


def test_the_word_of_who_is_quarantined_strikes_nobody() -> None:
    """It goes for its silence in other audits, and the step with it, before others were asked about what it said."""
    world = auditing("a", "b", "c", "d")
    by = found_wrong(world, "c")
    silent = Record(tuple(Strike(0, step, by) for step in range(3)))
    world.state = replace(world.state, auditing=replace(world.state.auditing, silent={by: silent}))
    world.wait(0.1)
    assert quarantined(world) == [(by, Charge.WITHHELD, True)]
    assert not world.state.auditing.withheld


@pytest.mark.parametrize("how", ["it leaves", "it fails"])
def test_who_refuses_what_an_audit_of_another_needs_and_ends_the_step_before_a_third_is_asked_has_a_strike(
    how: str,
) -> None:
    for who, strikes in (("a", 1), ("b", 0)):
        world = auditing("a", "b", "c", "d", "e")
        all_vote(world)
        asked_for(world, "c")
        by = auditor_of(world, "c")
        accused = "a" if by != "a" else "d"
        world.audit(by, withheld_by=accused, problem="WITHHELD")
        assert not world.state.auditing.withheld, "another is asked first"
        third = next(iter({"b", "e"} - {by}))
        ends(world, accused if who == "a" else third, how, lost="")
        assert len(world.state.auditing.withheld) == strikes


def test_who_leaves_whenever_it_is_asked_for_work_that_came_out_otherwise_is_suspended() -> None:
    """Its auditor says so a moment after it has gone."""
    world = auditing("a", "b", "c")
    for times in range(1, 4):
        assert not quarantined(world)
        all_vote(world)
        asked_for(world, "c")
        by = auditor_of(world, "c")
        order = world.last_to(by, "audit")
        world.lose("c")
        world.hear(by, audited(order, **ASKED_IN_VAIN))
        assert sum(record.attempts for record in world.state.auditing.withheld.values()) == times
        if times < 3:
            come_back(world, "c")
            world.automatic_audits = False
    trains_again(world)
    all_vote(world)
    assert [(node, charge) for node, charge, _ in quarantined(world)] == [("c", Charge.WITHHELD)]


def test_a_late_answer_counts_from_whom_it_is_due_once_and_of_who_has_left() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    asked_for(world, "c")
    by = auditor_of(world, "c")
    order = world.last_to(by, "audit")
    (other,) = {"a", "b"} - {by}
    world.lose("c")
    world.hear(other, audited(order, **ASKED_IN_VAIN))
    assert not world.state.auditing.withheld
    for _ in range(2):
        world.hear(by, audited(order, **ASKED_IN_VAIN))
    assert [record.attempts for record in world.state.auditing.withheld.values()] == [1]
    assert len(next(iter(world.state.auditing.withheld.values())).strikes) == 1
