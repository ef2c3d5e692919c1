"""Devices that came to the same bits until now may not be several hundredths apart, though in bf16 others may."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings, strategies as st

from dtfm.coordinator.core.trust.tolerance import FLOORS, PRECISIONS
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audit_scripts import (
    all_find_it_right_in_one_step,
    all_vote,
    asked,
    auditing,
    auditor_of,
    quarantined,
)
from tests.coordinator.script import LONG, World

BIAS = 0.045
"""More than what equal devices are apart, and less than what is allowed at first."""

FLOOR = FLOORS["bf16"]["addends"]
ROUNDING = 0.9 * FLOOR / 2
"""What a referee takes for rounding, however equal devices were until now."""


BF16 = {**LONG["train"], "precision": "bf16"}

GPU = wire.Device(kind="cuda", name="a gpu", memory_bytes=1 << 33, flops=1e11)


def learned(*nodes: str) -> World:
    """Nodes of one kind that have come to the same bits until now."""
    world = auditing(*nodes, train=BF16)
    for _ in range(6):
        all_find_it_right_in_one_step(world)
    return world


def joins_the_plan(world: World, node: str, device: wire.Device) -> None:
    world.join(node, device=device)
    all_find_it_right_in_one_step(world)
    world.apply()
    world.settle()
    assert node in world.plan_in_force.nodes


def finish_audits(world: World, error: Callable[[str, str], float], what: str = "addends") -> None:
    """All audits of the step in hand are answered. ``error``: how far an auditor finds this of a node off."""
    step = world.state.ledger.training.step
    while world.state.ledger.training.step == step and not quarantined(world) and any(asked(world).values()):
        for of, auditors in list(asked(world).items()):
            for by in auditors:
                if by in asked(world).get(of, ()):
                    world.audit(by, **{what: error(by, of)})


def answer_about(world: World, accused: str, errors: Mapping[str, float]) -> None:
    """All audits of the step in hand are answered: of this one's work so, by auditor, and of others' that it is right."""
    finish_audits(world, lambda by, of: errors[by] if of == accused else 0.0)


def others_say(world: World, accused: str, error: float) -> None:
    """Of the next step, whoever is asked."""
    all_vote(world)
    finish_audits(world, lambda by, of: error if of == accused else 0.0)


def audited_by(world: World, node: str, auditors: str) -> None:
    """Steps are right until one of these is to do the node's work again."""
    all_vote(world)
    while auditor_of(world, node) not in auditors:
        finish_audits(world, lambda by, of: 0.0)
        world.apply()  # if it pauses for another plan
        world.settle()
        all_vote(world)


def test_a_bias_that_is_rounding_at_first_is_found_once_equal_devices_have_shown_that_they_are() -> None:
    assert 2 * ROUNDING < BIAS < PRECISIONS["bf16"]
    world = auditing("a", "b", "c", train=BF16)
    others_say(world, "a", BIAS)
    assert not quarantined(world)
    world = learned("a", "b", "c")
    others_say(world, "a", BIAS)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]
    assert world.refolded() == world.state.ledger


def test_who_lies_from_the_beginning_does_not_teach_that_lies_are_rounding() -> None:
    world = auditing("a", "b", "c", train=BF16)
    while not quarantined(world):
        assert world.state.ledger.training.step < 8
        others_say(world, "a", BIAS)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


def test_what_another_number_of_threads_or_library_makes_is_rounding_though_all_bits_were_equal() -> None:
    world = learned("a", "b", "c")
    (sort,) = [sort for sort in world.state.ledger.trust.rounding if sort.startswith("addends")]
    assert all(row.largest == 0 for row in world.state.ledger.trust.rounding[sort])
    for error in (ROUNDING, 2 * ROUNDING):
        others_say(world, "a", error)
    assert not quarantined(world)
    assert all(event.clean for event in world.events(ev.WorkAudited))


def test_between_two_nobody_goes_for_what_is_unusual_and_it_is_known_from_then_on() -> None:
    world = learned("a", "b", "c")
    world.lose("c")
    world.settle()
    others_say(world, "a", BIAS)
    assert not quarantined(world)
    last = [event for event in world.events(ev.WorkAudited) if event.node == "a"][-1]
    assert (last.clean, last.tied, last.errors["addends"]) == (False, True, BIAS)


def test_who_alone_finds_unusual_what_others_find_right_changes_nothing() -> None:
    world = learned("a", "b", "c")
    all_vote(world)
    first = auditor_of(world, "a")
    (third,) = {"b", "c"} - {first}
    answer_about(world, "a", {first: BIAS, third: 0.0})
    assert not quarantined(world)
    assert [event.by for event in world.events(ev.WorkAudited) if event.node == "a"][-1] == third


def test_a_referee_whose_device_is_always_further_off_cannot_outvote_those_who_see_the_lie() -> None:
    world = auditing("a", "b", "c", train=BF16)
    joins_the_plan(world, "x", GPU)
    for _ in range(10):
        all_vote(world)
        finish_audits(world, lambda by, of: 0.004 if "x" in (by, of) else 0.0)
    audited_by(world, "a", "bc")
    answer_about(world, "a", {"b": 1.1 * FLOOR, "c": 1.1 * FLOOR, "x": 0.6 * FLOOR})
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


def test_it_is_undecided_if_a_referee_does_not_know_what_is_usual() -> None:
    world = learned("a", "b", "c")
    joins_the_plan(world, "d", GPU)
    world.lose("c")
    world.settle()
    audited_by(world, "a", "b")
    answer_about(world, "a", {"b": BIAS, "d": BIAS})
    assert quarantined(world) == [("a", Charge.AUDIT, True)]
    assert not world.events(ev.RolledBack)


@pytest.mark.parametrize("claim", [0.6, 3.0])
def test_who_claims_more_than_any_rounding_is_judged_as_ever(claim: float) -> None:
    world = learned("a", "b", "c")
    all_vote(world)
    liar = auditor_of(world, "a")
    (third,) = {"b", "c"} - {liar}
    answer_about(world, "a", {liar: claim, third: ROUNDING})
    assert quarantined(world) == [(liar, Charge.AUDIT, False)]


@settings(max_examples=12, deadline=None)
@given(st.floats(0, PRECISIONS["bf16"]), st.data())
def test_honest_devices_that_differ_accuse_nobody(apart: float, data: st.DataObject) -> None:
    """Those of one kind round otherwise at times. Those of two are ``apart``, at times half as much."""
    world = auditing("a", "b", "c", train=BF16)
    joins_the_plan(world, "x", GPU)

    def error(by: str, of: str) -> float:
        if "x" in (by, of):
            return data.draw(st.floats(apart / 2, apart))
        return data.draw(st.sampled_from([0.0, 0.45 * FLOORS["bf16"]["losses"]]))

    for _ in range(12):
        all_vote(world)
        finish_audits(world, error, "losses")
    assert not quarantined(world)
    assert len(world.state.ledger.trust.rounding) > 2


def test_an_audit_that_could_not_compare_a_bucket_of_norms_still_finds_the_rest_right() -> None:
    """In bf16; it says nothing of what the node added."""
    world = auditing("a", "b", "c", train=BF16)
    all_vote(world)
    finish_audits(world, lambda by, of: -1.0)
    assert world.state.ledger.training.step == 1
    assert all(world.state.ledger.trust.audits[node].clean == 1 for node in "abc")
    assert not any(world.state.ledger.trust.audits[node].last_added for node in "abc")
