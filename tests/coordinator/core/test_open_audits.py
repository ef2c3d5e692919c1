"""Audits that come to nothing: nobody gets work past them by withholding, leaving or failing, and who is slow or lost by accident
is not accused of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.coordinator.core.auditing.memory import MOST_TRIES
from dtfm.coordinator.core.auditing.order import needed
from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.trust.strikes import WORKED_OFF_BY, Record, Strike
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.fold import fold
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audits import audited
from tests.coordinator.core.test_auditing import (
    all_vote,
    answer_all,
    asked,
    auditing,
    auditor_of,
    quarantined,
    replicas,
    squares,
)
from tests.coordinator.script import LONG, World, fresh_state

ASKED_IN_VAIN = {"withheld_by": "c", "problem": "WITHHELD"}
"""An auditor has come to another digest than c, which hands out nothing to compare with."""


def asked_for(world: World, node: str) -> None:
    """Other audits are answered until this node's own work is being done again."""
    while not asked(world)[node] or world.last_to(auditor_of(world, node), "audit").node != node:
        other, by = next((of, by[0]) for of, by in asked(world).items() if of != node and by)
        assert world.last_to(by, "audit").node == other
        world.audit(by)


def trains_again(world: World) -> None:
    """All plans that are adopted are taken up."""
    while not isinstance(world.state.phase, Stepping):
        if world.state.phase.__class__.__name__ == "Pausing":
            world.apply()
        world.settle()


def aborts(world: World) -> list[str]:
    return [event.problem for event in world.events(ev.StepAborted)]


def test_a_step_of_which_the_audited_node_withholds_its_own_part_does_not_count_and_the_next_is_audited() -> None:
    world = auditing("a", "b", "c", rate=0.02)
    drawn(world, "c")
    answer_all(world, of="c", **ASKED_IN_VAIN)
    before = world.state.ledger.step
    assert aborts(world) == ["UNAUDITED"]
    assert not quarantined(world)
    world.settle()
    all_vote(world)
    assert world.state.ledger.step == before
    assert "c" in asked(world), "its next step is audited for certain"
    answer_all(world)
    assert world.state.ledger.step == before + 1


def drawn(world: World, node: str) -> None:
    """Steps pass until this node's work of one is done again."""
    all_vote(world)
    while node not in asked(world):
        answer_all(world)
        all_vote(world)


def test_who_was_given_nothing_is_not_believed_against_somebody_who_finds_the_work_right() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    asked_for(world, "a")
    first = auditor_of(world, "a")
    world.audit(first, withheld_by="a", problem="WITHHELD")
    answer_all(world)
    assert world.state.ledger.step == 1
    assert not world.state.auditing.withheld
    assert not quarantined(world)


def test_where_one_auditor_comes_to_nothing_another_party_is_asked() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    asked_for(world, "a")
    first = auditor_of(world, "a")
    world.audit(first, problem="no room")
    (second,) = {"b", "c"} - {first}
    asked_for(world, "a")
    assert auditor_of(world, "a") == second
    world.audit(second, addends=2.0)
    assert quarantined(world) == [("c", Charge.AUDIT, True)], "their word against each other: who came last"


def test_a_problem_does_not_hide_an_error() -> None:
    world = auditing("a", "b", "c")
    for _ in range(2):
        if not quarantined(world):
            answer_all(world, addends=2.0, problem="UNUSABLE: a piece")
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


def test_two_parties_of_which_one_compared_and_one_was_given_nothing_go_against_the_liar_undecided() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    asked_for(world, "c")
    world.audit(auditor_of(world, "c"), addends=2.0)
    asked_for(world, "c")
    world.audit(auditor_of(world, "c"), **ASKED_IN_VAIN)
    assert quarantined(world) == [("c", Charge.AUDIT, True)]
    assert world.events(ev.NodeQuarantined)[0].against == ("a", "b")


def test_who_withholds_whenever_it_has_lied_and_behaves_in_between_is_suspended() -> None:
    """It lies until it is asked for its tensors, behaves for a while, and lies again."""
    world = auditing("a", "b", "c", "d", rate=0.02)
    committed = behave = 0
    while not quarantined(world) and world.state.ledger.step < 2000:
        trains_again(world)
        before, lying = world.state.ledger.step, not behave
        behave = max(behave - 1, 0)
        strikes = sum(record.attempts for record in world.state.auditing.withheld.values())
        answer_all(world, of="c", **(ASKED_IN_VAIN if lying else {}))
        committed += lying and world.state.ledger.step > before
        if sum(record.attempts for record in world.state.auditing.withheld.values()) > strikes:
            behave = 10
    assert quarantined(world) == [("c", Charge.WITHHELD, True)]
    assert committed < 200


def test_a_strike_is_worked_off_by_many_audits_that_come_to_something() -> None:
    world = auditing("a", "b", "c")
    answer_all(world, of="c", **ASKED_IN_VAIN)
    world.settle()
    for _ in range(WORKED_OFF_BY - 1):
        answer_all(world)
        assert world.state.auditing.withheld
    answer_all(world)
    assert not world.state.auditing.withheld


def test_who_leaves_while_its_work_is_done_again_is_audited_when_it_comes_back() -> None:
    world = auditing("a", "b", "c", rate=0.02)
    drawn(world, "c")
    before = world.state.ledger.step
    world.lose("c")
    assert world.state.ledger.step == before
    assert aborts(world) == ["UNAUDITED"]
    come_back(world, "c")
    world.automatic_audits = False
    all_vote(world)
    assert "c" in asked(world)


def test_what_is_due_stays_due_until_somebody_has_come_to_something() -> None:
    world = auditing("a", "b", "c", rate=0.02)
    drawn(world, "c")
    answer_all(world, of="c", **ASKED_IN_VAIN)
    for _ in range(3):
        trains_again(world)
        all_vote(world)
        assert "c" in asked(world)
        answer_all(world, of="c", problem="no memory")
    all_vote(world)
    assert "c" in asked(world)
    answer_all(world)
    assert not world.state.auditing.due


def test_what_can_never_be_compared_does_not_slow_each_step_for_ever() -> None:
    world = auditing("a", "b", "c", rate=1e-9)
    world.state = replace(world.state, auditing=replace(world.state.auditing, due={"c": 0}))
    for _ in range(MOST_TRIES):
        all_vote(world)
        assert "c" in asked(world)
        answer_all(world, of="c", problem="no memory")
    before = world.state.ledger.step
    all_vote(world)
    assert world.state.ledger.step == before + 1, "nobody is asked"


def test_what_is_due_of_one_name_is_not_settled_by_an_audit_of_another_beside_it_in_the_plan() -> None:
    world = World(fresh_state(**LONG, trust={"audit_rate": 1.0}, cluster={"nodes": 3}), replicas)
    world.belong_together("a", "b")
    world.join("a", "b", "c")
    world.settle()
    world.automatic_audits = False
    world.state = replace(world.state, auditing=replace(world.state.auditing, due={"a": 0, "gone": 0}))
    world.belong_together("gone")
    answer_all(world, of="a", problem="no memory")
    assert world.state.auditing.due.keys() == {"a"}, "that of a name that is out of the plan is"
    answer_all(world)
    assert not world.state.auditing.due


def come_back(world: World, node: str) -> None:
    """It joins again, and has its part again."""
    world.automatic_audits = True
    trains_again(world)
    world.join(node)
    while node not in world.plan_in_force.nodes or not isinstance(world.state.phase, Stepping):
        if isinstance(world.state.phase, Stepping):
            world.step()
        trains_again(world)


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


def test_who_leaves_by_accident_while_it_is_audited_is_not_accused() -> None:
    """Its auditors have come to the same, or are called off before they have come to anything."""
    world = auditing("a", "b", "c")
    for times in range(8):
        all_vote(world)
        asked_for(world, "c")
        by = auditor_of(world, "c")
        order = world.last_to(by, "audit")
        world.lose("c")
        if times % 2:
            world.hear(by, audited(order))
        come_back(world, "c")
        world.automatic_audits = False
    assert not quarantined(world)
    assert not world.state.auditing.withheld


def test_an_auditor_is_told_how_long_it_has_so_that_it_can_say_who_kept_it_waiting() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    assert world.state.wakes_at is not None
    assert world.last_to("a", "audit").seconds == pytest.approx((world.state.wakes_at - world.now) * 2 / 3)


def test_neighbours_that_cannot_be_reached_or_are_slow_are_never_charged_nor_are_their_auditors() -> None:
    world = auditing("a", "b", "c", "d")
    for step in range(1, 13):
        all_vote(world)
        while world.state.ledger.step < step:
            accused, by = next((of, by[0]) for of, by in asked(world).items() if by)
            order = world.last_to(by, "audit")
            others = sorted(addend.node for each in order.sums for addend in each.addends if addend.node != by)
            assert order.node == accused
            world.audit(by, withheld_by=others[0], problem="WITHHELD", unreachable=True)
    assert not quarantined(world)
    assert not world.state.auditing.withheld


def test_an_auditor_that_takes_its_time_does_not_stretch_the_steps_that_come() -> None:
    world = auditing("a", "b", "c")
    waited = []
    for _ in range(4):
        all_vote(world)
        assert world.state.wakes_at is not None
        waited.append(world.state.wakes_at - world.now)
        world.wait(waited[-1] - 1.0, beating="abc")
        answer_all(world)
    assert waited == [waited[0]] * 4


def test_who_is_silent_twice_in_three_audits_is_suspended_though_it_answers_in_between() -> None:
    world = auditing("a", "b", "c")
    times = 0
    while not quarantined(world) and times < 10:
        trains_again(world)
        all_vote(world)
        step = world.state.ledger.step
        while world.state.ledger.step == step and not quarantined(world):
            honest = [by[0] for by in asked(world).values() if by and by[0] != "c"]
            times += not honest
            if honest:
                world.audit(honest[0])
            elif times % 3 == 0:
                world.audit("c")
            else:
                assert world.state.wakes_at is not None
                world.wait(world.state.wakes_at - world.now + 0.1, beating="abc")
    assert quarantined(world) == [("c", Charge.WITHHELD, True)]


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


@pytest.mark.parametrize("how", ["it leaves", "it fails", "it loses another"])
def test_who_ends_the_step_once_its_work_is_found_wrong_has_a_strike(how: str) -> None:
    world = auditing("a", "b", "c", "d")
    for times in range(1, 4):
        assert not quarantined(world)
        by = found_wrong(world, "c")
        ends(world, "c", how, lost=next(iter({"a", "b", "d"} - {by})))
        assert world.state.ledger.step < times * 10, "the step was not committed"
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
@pytest.mark.parametrize("who", ["the auditor", "a third"])
def test_who_is_accused_and_did_not_end_the_step_has_no_strike_and_is_audited_in_the_next(who: str, how: str) -> None:
    """Else a false auditor ends the step itself before others are asked, or lets a friend do so."""
    world = auditing("a", "b", "c", "d")
    by = found_wrong(world, "c")
    third = next(iter({"a", "b", "d"} - {by}))
    ends(world, by if who == "the auditor" else third, how, lost="c")
    assert world.state.ledger.step == 0, "the step was not committed"
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


def answers_of(world: World, changes: Callable[[str, wire.Audit], dict[str, Any]]) -> None:
    """All audits of a step are answered: by each node as it likes, of what it was asked."""
    trains_again(world)
    all_vote(world)
    step = world.state.ledger.step
    while world.state.ledger.step == step and isinstance(world.state.phase, Stepping) and asked(world):
        for accused, by in list(asked(world).items()):
            for node in by:
                if node in asked(world).get(accused, ()):
                    world.audit(node, **changes(node, world.last_to(node, "audit")))


def test_two_liars_who_say_that_a_third_handed_out_nothing_are_disproved_by_who_got_it() -> None:
    world = auditing("a", "b", "c", "d", "e")
    said = 0

    def lies(node: str, order: wire.Audit) -> dict[str, Any]:
        nonlocal said
        about = node in "de" and order.node not in "ade" and "a" in needed(order)
        said += about
        return {"withheld_by": "a", "problem": "WITHHELD"} if about else {}

    for _ in range(40):
        answers_of(world, lies)
    assert said >= 6
    assert world.state.ledger.step == 40
    assert not world.state.auditing.withheld
    assert not quarantined(world)


def test_who_hands_out_to_nobody_what_audits_of_another_need_is_suspended() -> None:
    world = auditing("a", "b", "c", "d")
    for _ in range(20):
        if not quarantined(world):
            answers_of(
                world,
                lambda node, order: (
                    {"withheld_by": "a", "problem": "WITHHELD"}
                    if order.node != "a" and node != "a"
                    else {"problem": "no memory"}
                ),
            )
    assert quarantined(world) == [("a", Charge.WITHHELD, True)]
    assert world.events(ev.NodeQuarantined)[0].reason.startswith("3 audits could not be done, as it withheld")


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


def test_what_somebody_said_counts_no_more_once_it_is_quarantined() -> None:
    world = auditing("a", "b", "c", "d")
    struck = Record(tuple(Strike(0, step, "a", ("d",)) for step in range(2)))
    world.state = replace(world.state, auditing=replace(world.state.auditing, withheld={("a", "a"): struck}))
    all_vote(world)
    while not quarantined(world):
        of, by = next((of, by[0]) for of, by in asked(world).items() if by)
        world.audit(by, **({"addends": 2.0} if of == "d" else {}))
    assert quarantined(world) == [("d", Charge.AUDIT, False)]
    trains_again(world)
    answer_all(world, of="a", **ASKED_IN_VAIN | {"withheld_by": "a"})
    assert world.state.auditing.withheld["a", "a"].attempts == 3
    assert len(quarantined(world)) == 1


def test_nor_does_it_excuse_who_withholds_its_own_work() -> None:
    """Of which there is one witness; of what others' audits needed, nobody's word is left."""
    world = auditing("a", "b")
    gone = ev.NodeQuarantined("gone", Charge.AUDIT, "it lied", 0, False, (), "", False)
    world.state = replace(world.state, ledger=fold([gone], world.state.ledger))
    struck = {
        ("a", "a"): Record(tuple(Strike(0, step, "a", ("b",)) for step in range(3))),
        ("a", "b"): Record((Strike(0, 0, "a", ("gone",)),)),
    }
    world.state = replace(world.state, auditing=replace(world.state.auditing, withheld=struck))
    all_vote(world)
    assert [charge for _, charge, _ in quarantined(world) if charge is not Charge.AUDIT] == [Charge.WITHHELD]


def two_names_in_a_row() -> World:
    """One key has a, of the first stage, and d, of the second, which gets its micro-batches from a."""
    state = fresh_state(**LONG, trust={"audit_rate": 1.0}, cluster={"nodes": 6})
    world = World(state, squares)
    world.belong_together("a", "d")
    world.join(*"abcdef")
    world.settle()
    world.automatic_audits = False
    return world


@pytest.mark.parametrize("unreachable", [False, True])
def test_a_party_that_hands_out_nothing_beside_its_own_work_is_suspended_though_it_seems_to_hang(
    unreachable: bool,
) -> None:
    world = two_names_in_a_row()
    for _ in range(3):
        assert not quarantined(world)
        answer_all(world, of="d", withheld_by="a", problem="WITHHELD", unreachable=unreachable)
    assert [(charge, undecided) for _, charge, undecided in quarantined(world)] == [(Charge.WITHHELD, True)]
    assert world.events(ev.NodeQuarantined)[0].key == "their key"


def test_what_a_party_hands_out_beside_its_own_work_takes_no_strike_away_before_that_work_is_found_right() -> None:
    world = two_names_in_a_row()
    answer_all(world, of="d", withheld_by="a", problem="WITHHELD")
    answer_all(world, of="d", losses=-1.0)
    assert world.state.auditing.withheld["their key", "their key"].since == 1, "of a alone"


def test_a_party_is_audited_though_it_says_that_its_own_name_beside_kept_nothing() -> None:
    world = two_names_in_a_row()
    for node in world.plan_in_force.nodes:
        world.vote(node, kept=node != "a")
    assert "d" in asked(world)


def test_sums_are_done_again_though_another_name_of_their_owners_key_kept_nothing() -> None:
    world = World(fresh_state(**LONG, trust={"audit_rate": 1.0}, cluster={"nodes": 3}), replicas)
    world.belong_together("a", "b")
    world.join("a", "b", "c")
    world.settle()
    world.automatic_audits = False
    for node in world.plan_in_force.nodes:
        world.vote(node, kept=node != "b")
    phase = world.state.phase
    assert isinstance(phase, Stepping)
    assert [len(audit.order.sums) for audit in phase.audits if audit.order.node == "a"] == [1]


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 5), st.binary(min_size=32, max_size=32), st.data())
def test_honest_nodes_that_come_and_go_are_never_accused(count: int, secret: bytes, data: st.DataObject) -> None:
    """Nor if a link between two of them is too slow for audits now and then."""
    names = "abcdef"[:count]
    state: State = fresh_state(**LONG, trust={"audit_rate": 0.3}, cluster={"nodes": count})
    world = World(replace(state, secret=secret), replicas)
    world.join(*names)
    world.settle()
    world.automatic_audits = False
    for _ in range(20):
        all_vote(world)
        leaver = data.draw(st.sampled_from([None, None, None, *names]))
        if leaver is not None:
            world.lose(leaver)
            come_back(world, leaver)
            world.automatic_audits = False
        else:
            answers(world, data)
        trains_again(world)
    assert not quarantined(world)


def answers(world: World, data: st.DataObject) -> None:
    step = world.state.ledger.step
    while world.state.ledger.step == step and isinstance(world.state.phase, Stepping) and asked(world):
        for accused, by in list(asked(world).items()):
            for node in by:
                order = world.last_to(node, "audit")
                slow = order.node == accused and data.draw(st.integers(0, 20)) == 0
                changes: dict[str, Any] = {"problem": "SLOW: it took too long"} if slow else {}
                if node in asked(world).get(accused, ()):
                    world.audit(node, **changes)


def test_strikes_are_not_worked_off_by_audits_that_a_friend_asked_for() -> None:
    world = auditing("a", "b", "c")
    answer_all(world, of="c", **ASKED_IN_VAIN)
    world.settle()
    for _ in range(WORKED_OFF_BY):
        all_vote(world)
        phase = world.state.phase
        assert isinstance(phase, Stepping)
        asked_by = tuple(replace(audit, raised_by="b") for audit in phase.audits)
        world.state = replace(world.state, phase=replace(phase, audits=asked_by))
        answer_all(world)
    assert world.state.auditing.withheld.keys() == {("c", "c")}
