"""Who keeps audits from coming to anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dtfm.coordinator.core.auditing import memory
from dtfm.coordinator.core.auditing.conclusion import Conclusion
from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.strikes import Record, Strike
from dtfm.coordinator.core.trust.verdict import Against, against_one
from dtfm.coordinator.core.validation import name_some
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


def _of_silence(record: Record | None) -> Conclusion | None:
    if record is None or record.attempts < ATTEMPTS:
        return None
    reason = f"it did not answer {record.attempts} audits, with few that it did in between"
    return Conclusion(Against((record.strikes[-1].node,), undecided=True), Charge.WITHHELD, reason)


def _why(strikes: Collection[Strike], sayers: str) -> str:
    ended = {strike.ended for strike in strikes}
    if ended == {False}:
        return f"could not be done, as it withheld what they need, said {sayers}"
    if ended == {True}:
        return f"could not be finished, as it ended the step when {sayers} had come to something else"
    return f"could not be finished, as it withheld what they need, or ended the step, from {sayers}"


def _of_withholding(ledger: Ledger, records: Mapping[str, Record], who: str) -> Conclusion | None:
    """``records``: by the party that was audited. Two other parties that accuse this one are believed. If there is only one, it
    is one's word against the other's. That counts only where the accused's own work was audited: only then it gains by
    withholding."""
    party = party_of(ledger)
    strikes = [strike for record in records.values() for strike in record.strikes]
    by = {party(each): each for strike in strikes for each in strike.by if party(each) != who}
    attempts = len({(strike.generation, strike.step) for strike in strikes})
    if attempts < ATTEMPTS or not by:
        return None
    node = strikes[-1].node
    reason = f"{attempts} audits {_why(strikes, name_some(by.values()))}"
    if len(by) > 1:
        verdict = Against((node,), tuple(sorted(by.values())), undecided=True)
        return Conclusion(verdict, Charge.WITHHELD, reason)
    if records.keys() == {who}:
        return Conclusion(against_one(ledger, (node, *by.values())), Charge.WITHHELD, reason)
    return None
