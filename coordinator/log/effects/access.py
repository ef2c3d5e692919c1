"""What events do to invitations and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.effects.trust import without_audits, without_witness
from dtfm.coordinator.log.ledger import (
    Invited,
    Ledger,
)
from dtfm.coordinator.log.rounding import without

MOST_INVITATIONS = 1000
"""From this number on, those that are not good any more are forgotten."""

MOST_REVOKED = 10_000
"""The number of revoked names that are remembered. From then on the oldest is forgotten for each new one."""


def with_room_for_another(ledger: Ledger, at: float) -> Mapping[str, Invited]:
    """All invitations, as long as there is room to remember those that are not good any more."""
    if len(ledger.invitations) < MOST_INVITATIONS:
        return ledger.invitations
    return {id: invited for id, invited in ledger.invitations.items() if invited.is_usable(at)}


def revoked(ledger: Ledger, event: ev.Revoked) -> Ledger:
    revoked = {**ledger.revoked, event.name: event.at} if event.name else ledger.revoked
    who = ledger.party(event.name)
    return replace(
        without_audits(without_witness(ledger, who), {who}),
        rounding=without(ledger.rounding, who),
        invitations={
            id: replace(invited, revoked=invited.revoked or id in event.invitations)
            for id, invited in ledger.invitations.items()
        },
        access={name: holder for name, holder in ledger.access.items() if name != event.name},
        revoked=dict(list(revoked.items())[-MOST_REVOKED:]),
    )
