"""The standing that a member has earned, with the reason. It follows from the ledger alone.

A standing belongs to a party: all names of a key share it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.trust import Audits

PROVEN_AFTER = 3
"""The number of audits in a row that must have found a stranger's work right. If two or more other parties can repeat the work,
at least two of them must have found it right."""


class Standing(enum.IntEnum):
    """The larger the standing, the more the party is believed."""

    QUARANTINED = 0
    """It takes no part."""
    SUSPECTED = 1
    """It was quarantined, and an operator let it come back, which does not show that its work is right."""
    NEW = 2
    """Nothing is known yet."""
    PROVEN = 3
    """Its work was found right often enough, or the members of the run know each other."""
    BELIEVED = 4
    """Its word decides: it runs on the coordinator's machine under its user, or the operator's invitation says so."""

    @property
    def word(self) -> str:
        """For people, and in the log."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Earned:
    """A standing, and the ``reason`` for it. ``audits``: the number of audits in a row that found its work right."""

    standing: Standing
    reason: str
    audits: int = 0

    @property
    def document(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {"word": self.standing.word, "reason": self.reason, "audits": self.audits}

    @property
    def is_earned(self) -> bool:
        """Whether there is anything to say about it: it is not just a member of a run where members know each other."""
        return self.standing < Standing.PROVEN or self.audits > 0


def standing_of(ledger: Ledger, name: str) -> Standing:
    """The standing of the name's party."""
    who, holder = ledger.party(name), ledger.access.names.get(name)
    if ledger.quarantine_of(name) is not None:
        return Standing.QUARANTINED
    if holder is not None and holder.believed:
        return Standing.BELIEVED
    if not ledger.is_open or _is_shown(ledger.trust.audits.get(who)):
        return Standing.PROVEN
    return Standing.SUSPECTED if who in ledger.trust.forgiven else Standing.NEW


def earned(ledger: Ledger, name: str) -> Earned:
    """The standing of the name's party, with the reason."""
    standing, audits = standing_of(ledger, name), ledger.trust.audits.get(ledger.party(name), Audits())
    return Earned(standing, _reason(ledger, name, standing, audits), audits.clean)


def _reason(ledger: Ledger, name: str, standing: Standing, audits: Audits) -> str:
    if (why := ledger.quarantine_of(name)) is not None:
        return f"{why.charge} in step {why.step}: {why.reason}"
    if standing is Standing.BELIEVED:
        return "whoever runs the coordinator vouches for it"
    if standing is Standing.PROVEN:
        return said_of(audits) if _is_shown(audits) else "members of this run know each other"
    lacks = "another party has to find it right, too" if audits.clean >= PROVEN_AFTER else f"{PROVEN_AFTER} prove it"
    so_far = f"{said_of(audits)}; {lacks}" if audits.clean else "no audit of its work yet"
    if (forgiven := ledger.trust.forgiven.get(ledger.party(name))) is not None:
        return f"an operator has forgiven it, after {forgiven.charge} in step {forgiven.step}; {so_far}"
    return so_far


def _is_shown(audits: Audits | None) -> bool:
    """Whether audits show that a stranger's work is right."""
    return audits is not None and audits.clean >= PROVEN_AFTER and audits.witnessed


def said_of(audits: Audits) -> str:
    """The audits in a row that found work right, in words."""
    many = f"{audits.clean} audits in a row" if audits.clean > 1 else "one audit"
    return f"{many}, the last at step {audits.last}"
