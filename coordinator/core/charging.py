"""A verdict goes into the log. core/quarantine.py has the rule that parts with those who are quarantined."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.verdict import Against
from dtfm.coordinator.core.validation.refusal import shorten
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import NodeQuarantined

_UNDECIDED = "it may not be at fault: `dtfm-coordinator forgive {}` lets it come back"


def quarantine(transition: Transition, verdict: Against, charge: Charge, reason: str) -> None:
    """Everybody against whom the verdict is takes no part from now on, for this reason."""
    for node in verdict.members:
        ledger = transition.state.ledger
        if ledger.quarantine_of(node) is not None:
            continue
        party = party_of(ledger)(node)
        key = party if party == ledger.key_of(node) else ""
        said = f"{reason}; {_UNDECIDED.format(node)}" if verdict.undecided else reason
        transition.emit(
            NodeQuarantined(
                node,
                charge,
                shorten(said),
                ledger.training.step,
                verdict.undecided,
                verdict.others,
                key,
                verdict.weighed,
            )
        )
    if not transition.state.ledger.trust.failures:
        transition.state = replace(transition.state, also=())
