"""Three audits by one party prove a stranger only where no other could do them."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned
from dtfm.coordinator.log.trust import MOST_WITNESSES
from tests.coordinator.audit_scripts import replicas
from tests.coordinator.script import LONG, World
from tests.coordinator.strangers import strangers

NEW, PROVEN = Standing.NEW, Standing.PROVEN


def audits(by: str, others: int = 2, clean: bool = True, of: str = "a") -> list[ev.Event]:
    """One audit of ``a`` by each of these parties. ``others`` could have repeated its work."""
    return [ev.WorkAudited(step, 1, of, who, 8, clean, {}, others=others) for step, who in enumerate(by, 1)]


def after(*events: ev.Event) -> Ledger:
    enrolled = (ev.Enrolled(node, "node", f"key of {node}", "") for node in ("a", "b"))
    return fold([ev.RunStarted("id", {"trust": {"mode": "open"}}), *enrolled, *events])


@pytest.mark.parametrize(
    ("events", "standing"),
    [
        (audits("bbb"), NEW),
        (audits("bbbbbbbb"), NEW),
        (audits("bbc"), PROVEN),
        (audits("cb"), NEW),
        (audits("bbb", others=1), PROVEN),
        ([*audits("bbb", others=1), *audits("b", others=5)], NEW),
        ([*audits("bbb", others=1), *audits("c", others=5)], PROVEN),
    ],
)
def test_two_parties_have_to_find_its_work_right_where_two_could(events: list[ev.Event], standing: Standing) -> None:
    its = earned(after(*events), "a")
    assert its.standing is standing
    if standing is NEW and its.audits >= PROVEN_AFTER:
        assert its.reason.endswith("another party has to find it right, too")


@pytest.mark.parametrize("end", ["quarantined", "revoked"])
def test_who_goes_has_found_nothing_right(end: str) -> None:
    enrolled = ev.Enrolled("c", "node", "key of c", "")
    gone = ev.NodeQuarantined("c", Charge.AUDIT, "why", 3, key="key of c")
    ledger = after(enrolled, *audits("bbc"), gone if end == "quarantined" else ev.Revoked("c", (), 0.0, "operator"))
    assert earned(ledger, "a").standing is NEW
    assert earned(fold(audits("d"), ledger), "a").standing is PROVEN


def test_the_number_of_remembered_entries_is_bounded() -> None:
    ledger = after(*audits("bcdefghijklmnop"))
    assert len(ledger.trust.audits["key of a"].by) == MOST_WITNESSES


def three_in_a_stage() -> World:
    return strangers("a", "b", "c", planner=replicas, **LONG, trust={"audit_rate": 1.0})


def test_a_friend_alone_does_not_prove_a_stranger_that_a_third_could_audit() -> None:
    world = three_in_a_stage()
    while (its := earned(world.state.ledger, "a")).standing is not PROVEN:
        world.step()
        assert world.state.ledger.training.step < 20
    assert its.audits >= PROVEN_AFTER
    row = [event for event in world.events(ev.WorkAudited) if event.node == "a"]
    assert {event.others for event in row} == {2}
    assert {event.by for event in row} == {"b", "c"}
    before = fold([event for event in world.log if event != row[-1]], world.start)
    assert earned(before, "a").standing is not PROVEN


@pytest.mark.parametrize("kept", [True, False])
def test_who_kept_nothing_could_not_have_been_asked(kept: bool) -> None:
    world = three_in_a_stage()
    for node in world.plan_in_force.nodes:
        world.vote(node, kept=node != "c" or kept)
    assert [event.others for event in world.events(ev.WorkAudited) if event.node == "a"] == [1 + kept]
