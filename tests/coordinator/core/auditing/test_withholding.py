"""Who hands out nothing of what audits need has strikes, and goes once there are enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dtfm.coordinator.core.auditing.order import needed
from dtfm.coordinator.core.trust.strikes import WORKED_OFF_BY, Record, Strike
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audit_scripts import (
    ASKED_IN_VAIN,
    all_vote,
    answer_all,
    answer_each,
    asked,
    asked_for,
    auditing,
    auditor_of,
    quarantined,
    trains_again,
)
from tests.coordinator.script import World


def test_who_withholds_what_audits_need_goes_once_two_others_have_said_so_three_times() -> None:
    world = auditing("a", "b", "c")
    for _ in range(3):
        assert not quarantined(world)
        world.settle()
        answer_all(world, withheld_by="a")
    assert quarantined(world) == [("a", Charge.WITHHELD, True)]
    assert world.events(ev.NodeQuarantined)[0].against == ("b", "c")
    assert world.state.ledger.training.step == 0, "nothing of it counted"
    assert not [event for event in world.events(ev.WorkAudited) if event.node == "a"]


def test_between_two_who_withholds_its_own_work_is_weighed_against_who_says_so() -> None:
    world = auditing("a", "b")
    for _ in range(2):
        answer_all(world)
    for _ in range(3):
        assert not quarantined(world)
        world.settle()
        answer_all(world, withheld_by="a")
    assert quarantined(world) == [("b", Charge.WITHHELD, True)], "who came last"


def test_who_withholds_its_own_work_is_not_cleared_by_what_it_hands_out_for_others() -> None:
    world = auditing("a", "b", "c")
    answer_all(world, withheld_by="a", problem="gone")
    assert world.state.auditing.withheld.keys() == {("a", "a")}
    before = world.state.auditing.withheld
    world.settle()
    all_vote(world)
    for accused in "bc":
        world.audit(auditor_of(world, accused))
    assert world.state.auditing.withheld == before


def test_who_sent_an_addend_may_be_said_to_withhold_it() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    by = auditor_of(world, "a")
    (other,) = {"b", "c"} - {by}
    world.audit(by, withheld_by=other, problem="it is gone")
    assert not world.state.auditing.withheld, "another is asked first"
    while asked(world).get("a") != [other] or world.last_to(other, "audit").node != "a":
        world.audit(other)
    world.audit(other)
    assert world.state.auditing.withheld.keys() == {(other, "a")}, "its own word clears nobody"


def test_who_was_given_nothing_is_not_believed_against_somebody_who_finds_the_work_right() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    asked_for(world, "a")
    first = auditor_of(world, "a")
    world.audit(first, withheld_by="a", problem="WITHHELD")
    answer_all(world)
    assert world.state.ledger.training.step == 1
    assert not world.state.auditing.withheld
    assert not quarantined(world)


def test_who_withholds_whenever_it_has_lied_and_behaves_in_between_is_suspended() -> None:
    """It lies until it is asked for its tensors, behaves for a while, and lies again."""
    world = auditing("a", "b", "c", "d", rate=0.02)
    committed = behave = 0
    while not quarantined(world) and world.state.ledger.training.step < 2000:
        trains_again(world)
        before, lying = world.state.ledger.training.step, not behave
        behave = max(behave - 1, 0)
        strikes = sum(record.attempts for record in world.state.auditing.withheld.values())
        answer_all(world, of="c", **(ASKED_IN_VAIN if lying else {}))
        committed += lying and world.state.ledger.training.step > before
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


def answers_of(world: World, changes: Callable[[str, wire.Audit], dict[str, Any]]) -> None:
    """All audits of a step are answered: by each node as it likes, of what it was asked."""
    trains_again(world)
    all_vote(world)
    answer_each(world, lambda _, by: changes(by, world.last_to(by, "audit")))


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
    assert world.state.ledger.training.step == 40
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
