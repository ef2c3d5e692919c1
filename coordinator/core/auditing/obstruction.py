"""Who keeps audits from coming to anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtfm.coordinator.core.auditing.conclusion import Conclusion
from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import Strike
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.verdict import Against, against_one
from dtfm.coordinator.core.validation import name_some
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger


def obstruction(transition: Transition) -> Conclusion | None:
    """Whether audits come to nothing because of one node, again and again. What is remembered of it is forgotten then."""
    memory = transition.state.auditing
    for node in sorted(memory.silent.keys() | memory.withheld.keys()):
        found = _of_silence(memory.silent.get(node, 0), node)
        found = found or _of_withholding(transition.state.ledger, memory.withheld.get(node, ()), node)
        if found is not None:
            silent = {each: times for each, times in memory.silent.items() if each != node}
            withheld = {each: strikes for each, strikes in memory.withheld.items() if each != node}
            memory = replace(memory, silent=silent, withheld=withheld)
            transition.state = replace(transition.state, auditing=memory)
            return found
    return None


def _of_silence(times: int, node: str) -> Conclusion | None:
    if times < ATTEMPTS:
        return None
    reason = f"it has not answered {times} audits in a row"
    return Conclusion(Against((node,), undecided=True), Charge.WITHHELD, reason)


def _of_withholding(ledger: Ledger, strikes: Sequence[Strike], node: str) -> Conclusion | None:
    """Two other parties are believed. Of one it is its word against the node's, and that counts only where the node was audited
    itself: it alone gains by withholding."""
    party = party_of(ledger)
    by = {party(strike.by): strike.by for strike in strikes if party(strike.by) != party(node)}
    if len({strike.step for strike in strikes}) < ATTEMPTS or not by:
        return None
    reason = (
        f"{ATTEMPTS} audits in a row could not be done, as it withheld what they need, said {name_some(by.values())}"
    )
    if len(by) > 1:
        verdict = Against((node,), tuple(sorted(by.values())), undecided=True)
        return Conclusion(verdict, Charge.WITHHELD, reason)
    if all(strike.of == node for strike in strikes):
        return Conclusion(against_one(ledger, (node, *by.values())), Charge.WITHHELD, reason)
    return None
