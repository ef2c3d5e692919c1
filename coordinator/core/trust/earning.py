"""Says in the log when a member has earned another standing."""

from __future__ import annotations

from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.standing import earned, standing_of


def tell(transition: Transition) -> None:
    """At the end of a tick: of whom audits have changed the standing. Quarantines and trials have events of their own."""
    before, ledger = transition.before.ledger, transition.state.ledger
    if ledger.trust.audits is before.trust.audits:
        return
    for node in sorted(ledger.members):
        who = ledger.party(node)
        if ledger.trust.audits.get(who) is before.trust.audits.get(who) or ledger.quarantine_of(node) is not None:
            continue
        now = earned(ledger, node)
        if now.standing is not standing_of(before, node):
            transition.emit(ev.StandingChanged(node, now.standing.word, now.reason))
