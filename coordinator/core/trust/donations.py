"""Who gave others state that was not what those have who trained it."""

from __future__ import annotations

from collections.abc import Sequence

from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.log.ledger import Ledger


def believed_donors(ledger: Ledger, node: str, holders: Sequence[str]) -> Sequence[str]:
    """Of those who hold some state: ``node``, if it does, and those from whom it may copy it. They are those whom nobody has
    accused of handing out something else, if there are any; else those whom it has not accused itself; else all."""
    if not ledger.refused:
        return holders
    party = party_of(ledger)
    accused = {party(donor) for _, donors in ledger.refused for donor in donors}
    by_node = {party(donor) for who, donors in ledger.refused if who == node for donor in donors}
    for doubted in (accused, by_node):
        if others := [holder for holder in holders if holder != node and party(holder) not in doubted]:
            return [holder for holder in holders if holder == node or holder in others]
    return holders


def accusers(ledger: Ledger, donor: str) -> frozenset[str]:
    """The parties, other than its own, that had wrong state from this donor alone."""
    party = party_of(ledger)
    whose = {party(node) for node, donors in ledger.refused if {party(each) for each in donors} == {party(donor)}}
    return frozenset(whose - {party(donor)})


def has_accused(ledger: Ledger, node: str) -> frozenset[str]:
    """The parties of the donors from which the node, or another of its party, had wrong state."""
    party = party_of(ledger)
    return frozenset(party(donor) for who, donors in ledger.refused if party(who) == party(node) for donor in donors)
