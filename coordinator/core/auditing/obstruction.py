"""Who keeps audits from coming to anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.auditing import memory
from dtfm.coordinator.core.auditing.conclusion import Conclusion
from dtfm.coordinator.core.auditing.views import View, refusals, views_of
from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import Audit
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.strikes import Record, Strike
from dtfm.coordinator.core.trust.verdict import Against, against_one
from dtfm.coordinator.core.validation.refusal import name_some
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger


def obstruction(transition: Transition) -> Conclusion | None:
    """The conclusion if audits came to nothing too often because of one party, whose strikes are forgotten then."""
    remembered, ledger = transition.state.auditing, transition.state.ledger
    for who in sorted(remembered.silent.keys() | {who for who, _ in remembered.withheld}):
        found = _of_silence(remembered.silent.get(who))
        found = found or _of_withholding(
            ledger, {of: record for (by, of), record in remembered.withheld.items() if by == who}, who
        )
        if found is not None:
            memory.forgotten(transition, who)
            return found
    return None


def charge_neighbours(
    transition: Transition, audit: Audit, ender: str = "", believed: Collection[str] | None = None
) -> None:
    """The audit is answered. Who did not hand out what it needs has a strike for that (`refusals`), unless another party has got
    it, and come to something. ``ender`` has ended the step before all have answered: only its own party has strikes then, by
    the word of those who are ``believed``."""
    party, of = party_of(transition.state.ledger), audit.order.node
    came = {party(by) for by, view in views_of(transition.state, audit).items() if view is not View.NOTHING}
    for node, sayers in refusals(transition.state, audit).items():
        by = [each for each in sayers if believed is None or each in believed]
        if by and came <= {party(node)} and (not ender or party(node) == party(ender)):
            memory.withheld(transition, node, of, by, (audit.order.generation, audit.order.step))


def _of_silence(record: Record | None) -> Conclusion | None:
    if record is None or record.attempts < ATTEMPTS:
        return None
    reason = f"it did not answer {record.attempts} audits, with few that it did in between"
    return Conclusion(Against((record.strikes[-1].node,), undecided=True), Charge.WITHHELD, reason)


def _believed(ledger: Ledger, strike: Strike) -> Strike | None:
    """What is left of the strike without the word of those who are quarantined by now."""
    by = tuple(each for each in strike.by if ledger.quarantine_of(each) is None)
    return replace(strike, by=by) if by else None


def _why(strikes: Collection[Strike], sayers: str) -> str:
    ended = {strike.ended for strike in strikes}
    if ended == {False}:
        return f"could not be done, as it withheld what they need, said {sayers}"
    if ended == {True}:
        return f"could not be finished, as it ended the step when {sayers} had come to something else"
    return f"could not be finished, as it withheld what they need, or ended the step, from {sayers}"


def _of_withholding(ledger: Ledger, records: Mapping[str, Record], who: str) -> Conclusion | None:
    """``records``: by the party that was audited. The word of who is quarantined by now does not count. Two other parties that
    accuse this one are believed. If there is only one, it is one's word against the other's. That counts only where the
    accused's own work was audited: only then it gains by withholding."""
    party = party_of(ledger)
    believed = {of: [_believed(ledger, strike) for strike in record.strikes] for of, record in records.items()}
    left = {of: [strike for strike in strikes if strike is not None] for of, strikes in believed.items()}
    strikes = [strike for each in left.values() for strike in each]
    by = {party(each): each for strike in strikes for each in strike.by if party(each) != who}
    attempts = len({(strike.generation, strike.step) for strike in strikes})
    if attempts < ATTEMPTS or not by:
        return None
    node = strikes[-1].node
    reason = f"{attempts} audits {_why(strikes, name_some(by.values()))}"
    if len(by) > 1:
        verdict = Against((node,), tuple(sorted(by.values())), undecided=True)
        return Conclusion(verdict, Charge.WITHHELD, reason)
    if not any(each for of, each in left.items() if of != who):
        return Conclusion(against_one(ledger, (node, *by.values())), Charge.WITHHELD, reason)
    return None
