"""Disputes: pairs of members. One of the two is at fault, and at least one of them says so.

Two members are in dispute when they have contradicted each other, or when one has accused the other in ATTEMPTS attempts. The
dispute lasts as long as these suspicions (log/charges.py). While it lasts, plans keep the two apart, even if their link works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.coordinator.log.standing import standing_of
from dtfm.coordinator.log.trust import Suspicion


def kept_apart(ledger: Ledger) -> frozenset[Pair]:
    """The pairs that plans keep apart: pairs with a broken link, and pairs in dispute."""
    return ledger.reach.broken | disputes(ledger)


def disputes(ledger: Ledger, but: tuple[int, int] | None = None) -> frozenset[Pair]:
    """The pairs in dispute. ``but``: leaves out the suspicions of this attempt."""
    return frozenset(standing_against([each for each in between_two(ledger) if each.attempt != but]))


def disputed(ledger: Ledger) -> frozenset[str]:
    """The parties in dispute with a party of at least their standing."""
    found = set[str]()
    for pair in disputes(ledger):
        for one, other in (pair, pair[::-1]):
            if standing_of(ledger, other) >= standing_of(ledger, one):
                found.add(ledger.party(one))
    return frozenset(found)


def between_two(ledger: Ledger) -> list[Suspicion]:
    """The suspicions of two members of different parties where one of the two is the accuser."""
    return [
        each
        for each in ledger.trust.suspicions
        if len(each.nodes) == 2
        and each.said.by
        and {*each.nodes} <= ledger.members.keys()
        and ledger.party(each.nodes[0]) != ledger.party(each.nodes[1])
    ]


def standing_against(said: Sequence[Suspicion]) -> set[Pair]:
    """The pairs that contradict each other, or have accused each other in ATTEMPTS attempts, according to these suspicions."""
    times = attempts_of(said)
    return {
        pair_of(*each.nodes)
        for each in said
        if each.said.charge.is_contradiction or times[pair_of(*each.nodes)] >= ATTEMPTS
    }


def attempts_of(said: Iterable[Suspicion]) -> Counter[Pair]:
    """By pair, the number of attempts that made one of the two suspected."""
    return Counter(pair for pair, _ in {(pair_of(*each.nodes), each.attempt) for each in said})


def against(ledger: Ledger) -> dict[str, dict[str, str]]:
    """By party, the parties that it stands against, each with the name of a node."""
    found: dict[str, dict[str, str]] = {}
    for pair in sorted(standing_against(between_two(ledger))):
        for one, other in (pair, pair[::-1]):
            found.setdefault(ledger.party(one), {})[ledger.party(other)] = other
    return found
