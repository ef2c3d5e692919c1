"""Work of a step is repeated before its commit, and the node at fault goes: `core/trust/judgement.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from tests.coordinator.audit_scripts import (
    all_vote,
    answer_all,
    answer_each,
    asked,
    asked_for,
    auditing,
    auditor_of,
    quarantined,
    replicas,
    squares,
    trains_again,
)
from tests.coordinator.script import LONG, World, fresh_state


def test_a_small_difference_is_rounding() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    world.audit(auditor_of(world, "a"), losses=5e-4, addends=9e-4)
    assert world.events(ev.WorkAudited)[0].clean
    assert world.events(ev.WorkAudited)[0].errors == {"losses": 5e-4, "addends": 9e-4}


def test_what_two_others_find_wrong_goes_and_the_step_goes_on_without_it() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    first = auditor_of(world, "a")
    world.audit(first, addends=0.05)
    assert not world.events(ev.WorkAudited), "the third is asked first"
    (second,) = {"b", "c"} - {first}
    while second not in asked(world)["a"]:
        world.audit(second)  # it does one after the other
    assert world.last_to(second, "audit").node == "a"
    world.audit(second, addends=0.03)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]
    assert [(event.node, event.clean) for event in world.events(ev.WorkAudited)][-1] == ("a", False)
    assert world.events(ev.StepAborted)[-1].problem == "SETTLED"
    assert "a" not in world.state.ledger.members
    assert world.plan_in_force.nodes == ("b", "c")


def test_who_says_that_right_work_is_wrong_goes_itself_and_the_step_counts_for_nothing() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    liar = auditor_of(world, "a")
    (third,) = {"b", "c"} - {liar}
    world.audit(liar, addends=2.0)
    while third not in asked(world)["a"]:
        world.audit(third)
    world.audit(third)
    assert quarantined(world) == [(liar, Charge.AUDIT, False)]
    assert "a" in world.plan_in_force.nodes
    assert world.state.ledger.training.step == 0


def test_who_lies_by_just_as_much_as_one_auditor_finds_sets_no_two_against_each_other() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    first = auditor_of(world, "a")
    (second,) = {"b", "c"} - {first}
    world.audit(first, addends=1.01e-3)
    while second not in asked(world)["a"]:
        world.audit(second)
    world.audit(second, addends=0.99e-3)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


def test_between_two_nobody_goes_and_they_are_kept_apart() -> None:
    world = auditing("a", "b")
    all_vote(world)
    world.audit("b", losses=1.0)
    assert quarantined(world) == []
    assert kept_apart(world.state.ledger) == {("a", "b")}
    assert world.state.ledger.training.step == 0
    assert not world.events(ev.RolledBack)


def test_among_strangers_two_who_agree_against_a_third_throw_nobody_out() -> None:
    """Two of three replicas may collude: the stage is split, and whoever they meet next is a witness."""
    world = auditing("a", "b", "c", mode="open")
    answer_all(world, of="a", addends=2.0)
    assert quarantined(world) == []
    assert kept_apart(world.state.ledger) == {("a", "b"), ("a", "c")}


def test_three_strangers_who_find_it_wrong_are_enough() -> None:
    world = auditing("a", "b", "c", "d", mode="open")
    answer_all(world, of="a", addends=2.0)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


@pytest.mark.parametrize("liars", ["a", "ac"])
def test_a_believed_node_decides_and_is_asked_first(liars: str) -> None:
    """b is believed. a lies, and c may say that a's work is right."""
    world = auditing("a", "b", "c", mode="open", believed="b")
    while not quarantined(world):
        trains_again(world)
        all_vote(world)
        answer_each(world, lambda of, by: {"addends": 2.0} if of == "a" and by not in liars else {})
    assert quarantined(world)[0] == ("a", Charge.AUDIT, False)
    assert "b" not in {node for node, _, _ in quarantined(world)}


def test_if_an_auditor_has_no_result_another_party_is_asked() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    asked_for(world, "a")
    first = auditor_of(world, "a")
    world.audit(first, problem="no room")
    (second,) = {"b", "c"} - {first}
    asked_for(world, "a")
    assert auditor_of(world, "a") == second
    world.audit(second, addends=2.0)
    assert kept_apart(world.state.ledger) == {("a", second)}, "their word against each other"


def test_a_problem_does_not_hide_an_error() -> None:
    world = auditing("a", "b", "c")
    for _ in range(2):
        if not quarantined(world):
            answer_all(world, addends=2.0, problem="UNUSABLE: a piece")
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


@given(st.integers(2, 6), st.floats(0.01, 1.0), st.binary(min_size=32, max_size=32), st.booleans())
def test_an_honest_run_accuses_nobody_whatever_is_drawn(count: int, rate: float, secret: bytes, several: bool) -> None:
    world = World(
        replace(fresh_state(**LONG, trust={"audit_rate": rate}, cluster={"nodes": count}), secret=secret),
        squares if count in (4, 6) else replicas,
    )
    if several:
        world.belong_together("a", "c")
    world.join(*"abcdef"[:count])
    world.settle()
    for _ in range(12):
        world.step()
    assert world.state.ledger.training.step == 12
    assert not quarantined(world)
    assert all(event.clean for event in world.events(ev.WorkAudited))


@given(st.integers(3, 4), st.data())
def test_a_single_liar_among_three_parties_or_more_is_found_once_it_is_audited_or_audits(
    count: int, data: st.DataObject
) -> None:
    """Its work is wrong, or it accuses everybody, or both."""
    names = "abcdef"[:count]
    liar, spoils = data.draw(st.sampled_from(names)), data.draw(st.booleans())
    accuses = data.draw(st.booleans()) or not spoils
    world = auditing(*names)
    all_vote(world)
    for _ in range(10):
        if quarantined(world):
            break
        for accused, by in list(asked(world).items()):
            for node in data.draw(st.permutations(by)):
                wrong = accuses if node == liar else accused == liar and spoils
                if isinstance(world.state.phase, Stepping) and node in asked(world).get(accused, ()):
                    world.audit(node, losses=2.0 if wrong else 0.0)
    assert quarantined(world) == [(liar, Charge.AUDIT, False)]
