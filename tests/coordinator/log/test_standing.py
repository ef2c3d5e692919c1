"""What a member has earned, and why: `log/standing.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned
from dtfm.coordinator.log.trust import CLEARED_BY
from dtfm.scheduler.model.plan import Stage, from_routes

NEW, PROVEN, SUSPECTED, QUARANTINED = Standing.NEW, Standing.PROVEN, Standing.SUSPECTED, Standing.QUARANTINED


def run(mode: str, *events: ev.Event) -> Ledger:
    enrolled = [ev.Enrolled(node, "node", "its key", "") for node in ("a", "a-2")] + [ev.Enrolled("b", "node", "b", "")]
    return fold([ev.RunStarted("id", {"trust": {"mode": mode}}), *enrolled, *events])


def audits(*clean: bool, first: int = 1) -> list[ev.Event]:
    """One audit of a's work per step, from the ``first`` on."""
    return [ev.WorkAudited(step, 1, "a", "b", 8, each, {}) for step, each in enumerate(clean, first)]


QUARANTINE = ev.NodeQuarantined("a", Charge.DIGEST, "why", 7, undecided=True, key="its key")
FORGIVEN = ev.NodeForgiven("a", "operator", "its key")
CLEARED = ev.NodeForgiven("a", CLEARED_BY, "its key")
JOINED = ev.NodeJoined("a", "new", "", ev.DeviceSeen("cpu", "", 1, 1.0), "", "1")
ADOPTED = ev.PlanAdopted(1, from_routes(1, [Stage((0, 1), ("a",), ())], [(("a",), 8)]), "first", 0)
WORKED = ev.StepCommitted(1, 1, 0.5, 10, 1.0, 2.0, 8, {}, {})
REVOKED = ev.Revoked("a", (), 0.0, "operator")


@pytest.mark.parametrize(
    ("happened", "standing"),
    [
        ([], NEW),
        (audits(*[True] * (PROVEN_AFTER - 1)), NEW),
        (audits(*[True] * PROVEN_AFTER), PROVEN),
        (audits(*[True] * PROVEN_AFTER, False), PROVEN),
        (audits(True, False, True), NEW),
        ([*audits(*[True] * PROVEN_AFTER), QUARANTINE], QUARANTINED),
        ([*audits(*[True] * PROVEN_AFTER), QUARANTINE, FORGIVEN], SUSPECTED),
        ([QUARANTINE, FORGIVEN, *audits(*[True] * PROVEN_AFTER)], PROVEN),
        ([QUARANTINE, CLEARED], NEW),
        ([*audits(*[True] * PROVEN_AFTER), QUARANTINE, CLEARED], PROVEN),
        ([QUARANTINE, FORGIVEN, *audits(True), QUARANTINE, CLEARED], SUSPECTED),
    ],
)
def test_a_stranger_is_proven_by_audits_alone(happened: list[ev.Event], standing: Standing) -> None:
    ledger = run("open", *happened)
    assert earned(ledger, "a").standing is standing
    assert earned(ledger, "a-2").standing is standing  # a machine has one standing
    assert earned(ledger, "somebody else").standing is NEW


@pytest.mark.parametrize(
    ("happened", "standing"),
    [
        ([], PROVEN),
        (audits(False), PROVEN),
        ([QUARANTINE], QUARANTINED),
        ([QUARANTINE, FORGIVEN], PROVEN),
    ],
)
def test_members_who_know_each_other_are_proven_until_they_are_quarantined(
    happened: list[ev.Event], standing: Standing
) -> None:
    assert earned(run("trusted", *happened), "a").standing is standing


def test_who_has_worked_and_was_not_audited_yet_is_no_suspect() -> None:
    ledger = fold([ev.RunStarted("id", {}), JOINED, ADOPTED, WORKED])
    assert ledger.trust.began == {"a": 0}
    assert earned(ledger, "a").standing is PROVEN
    assert earned(replace(ledger, run={"trust": {"mode": "open"}}), "a").standing is NEW


def test_a_key_that_is_let_in_again_after_it_was_revoked_starts_as_a_newcomer() -> None:
    again = ev.Enrolled("a-3", "node", "its key", "another invitation")
    ledger = run("open", *audits(*[True] * PROVEN_AFTER), REVOKED, again)
    assert earned(ledger, "a-3").standing is NEW


def test_who_is_cleared_is_answerable_for_all_since_its_last_clean_audit() -> None:
    ledger = run("open", JOINED, ADOPTED, WORKED, *audits(True), QUARANTINE, CLEARED)
    assert (ledger.trust.audits["its key"].last, ledger.trust.began) == (1, {"its key": 0})


def test_each_standing_says_why() -> None:
    def sentence(*happened: ev.Event) -> str:
        its = earned(run("open", *happened), "a")
        return f"{its.standing.word}: {its.reason}"

    assert sentence() == "new: no audit of its work yet"
    assert sentence(*audits(True, first=9)) == "new: one audit, the last at step 9; 3 prove it"
    assert sentence(*audits(*[True] * 12, first=329)) == "proven: 12 audits in a row, the last at step 340"
    assert sentence(QUARANTINE) == "quarantined: DIGEST in step 7: why"
    forgiven = "suspected: an operator has forgiven it, after DIGEST in step 7; no audit of its work yet"
    assert sentence(QUARANTINE, FORGIVEN) == forgiven
