"""Contradictions and failures, and against whom they are settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.core.trust.standing import is_alone, party_of, standing, weakest
from dtfm.coordinator.log.ledger import Ledger

View = TypeVar("View")

WITHOUT_ONE_CAUSE = 3 * ATTEMPTS
"""So many attempts at the same step may wait in vain while none may be the cause of ATTEMPTS of them in a row. Two who are silent
in turn can do that, and so can two bad machines."""


@dataclass(frozen=True, slots=True)
class Against:
    """These ``members`` are to be quarantined, a name for each party. ``undecided``: they may not be at fault; it is their word
    against that of the ``others``, or what they suffer from may have come from elsewhere. ``weighed``: the others had the better
    standing, and nothing else speaks for them."""

    members: tuple[str, ...]
    others: tuple[str, ...] = ()
    undecided: bool = False
    weighed: bool = False


@dataclass(frozen=True, slots=True)
class OfTheRun:
    """Several who are independent of each other say so, or there is nobody else: the run itself is at fault."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """Too little is known. It is tried again."""


def settle(ledger: Ledger, views: Mapping[str, View], agree: Callable[[View, View], bool]) -> Against | None:
    """Nodes say what should be the same, each its view. None: it is, or there is one view with which all agree, though not all
    agree with each other (``agree`` may allow for rounding).

    The view of more than half of the parties holds. If no view has so many, that of the most parties does, or of those of better
    standing among as many, and the others are undecided. A party whose own names contradict each other supports no view.
    """
    first = next(iter(views.values()), None)
    if first is None or all(agree(first, other) for other in views.values()):
        return None
    party, of = party_of(ledger), standing(ledger)
    everybody = {party(node) for node in views}

    def supporters(view: View) -> frozenset[str]:
        against = {party(node) for node, other in views.items() if not agree(view, other)}
        return frozenset(everybody - against)

    def weight(node: str) -> tuple[int, tuple[int, int, int, int], str]:
        held_by = supporters(views[node])
        best = max((of(other) for other in views if party(other) in held_by), default=of(node))
        return len(held_by), best, node

    winners = supporters(views[max(sorted(views), key=weight)])
    losers = {party(node): node for node in sorted(views, reverse=True) if party(node) not in winners}
    if not losers:
        return None
    others = {party(node): node for node in sorted(views, reverse=True) if party(node) in winners}
    weighed = bool(others) and 2 * len(winners) <= len(everybody)
    return Against(tuple(sorted(losers.values())), tuple(sorted(others.values())), undecided=weighed, weighed=weighed)


def against_one(ledger: Ledger, suspects: Collection[str]) -> Against:
    """One of them is at fault. If there are several, who of them has the least standing is quarantined, undecided."""
    party, accused = party_of(ledger), weakest(ledger, suspects)
    others = tuple(sorted(node for node in suspects if party(node) != party(accused)))
    return Against((accused,), others, undecided=bool(others), weighed=bool(others))


def blame_for_waiting(ledger: Ledger) -> Against | Unsettled:
    """Attempts have waited in vain (Ledger.waited_for). A party that may have been the cause of each of the last ATTEMPTS is at
    fault; if there are several, one of them, undecided. So is one, undecided, that has left meanwhile and come back, and has not
    taken part in a committed step since. After WITHOUT_ONE_CAUSE attempts it is one of those who were suspected
    most often, undecided: several may be silent in turn."""
    if not ledger.trust.waited_for:
        return Unsettled()
    party, last = party_of(ledger), ledger.trust.waited_for[-ATTEMPTS:]
    in_a_row = {party(node): _in_a_row(ledger, node) for node in last[-1]}
    if suspects := [node for node in last[-1] if in_a_row[party(node)] >= ATTEMPTS]:
        return against_one(ledger, suspects)
    if suspects := [node for node in last[-1] if in_a_row[party(node)] + _evaded(ledger, node) >= ATTEMPTS]:
        return replace(against_one(ledger, suspects), undecided=True)
    if len(ledger.trust.waited_for) < WITHOUT_ONE_CAUSE:
        return Unsettled()
    names = frozenset[str]().union(*ledger.trust.waited_for)
    times = {node: times_suspected(ledger, node) for node in names}
    most = [node for node in names if times[node] == max(times.values())]
    return replace(against_one(ledger, most), undecided=True) if most else Unsettled()


def times_suspected(ledger: Ledger, node: str) -> int:
    """In how many of the attempts that waited in vain its party was suspected."""
    party = party_of(ledger)
    return sum(party(node) in map(party, suspects) for suspects in ledger.trust.waited_for) + _evaded(ledger, node)


def _in_a_row(ledger: Ledger, node: str) -> int:
    """In how many of the last attempts in a row its party was suspected."""
    party = party_of(ledger)
    suspected = [party(node) in map(party, suspects) for suspects in reversed(ledger.trust.waited_for)]
    return suspected.index(False) if False in suspected else len(suspected)


def _evaded(ledger: Ledger, node: str) -> int:
    """How many attempts had waited for its party when it left."""
    party = party_of(ledger)
    return sum(times for name, times in ledger.trust.evaded.items() if party(name) == party(node))


def blame(ledger: Ledger, reports: Sequence[str], also: Collection[str] = ()) -> Against | OfTheRun | Unsettled:
    """Attempts have failed in a row, and ``reports`` names who said so, an attempt each; ``also`` are others who said the same of
    one of these attempts.

    One party behind ATTEMPTS of them while no other has said so twice is at fault itself. Two parties that have said so twice are
    believed: the run is at fault.
    """
    if len(reports) < ATTEMPTS:
        return Unsettled()
    if is_alone(ledger):
        return OfTheRun()
    if len(named_twice(ledger, (*reports, *also))) >= 2:
        return OfTheRun()
    party = party_of(ledger)
    times = sum(party(node) == party(reports[-1]) for node in (*reports, *also))
    return Against((reports[-1],)) if times >= ATTEMPTS else Unsettled()


def named_twice(ledger: Ledger, reports: Collection[str]) -> tuple[str, ...]:
    """Of each party that the reports name more than once, a name, in order."""
    party = party_of(ledger)
    said = Counter(map(party, reports))
    names = {party(node): node for node in sorted(reports, reverse=True)}
    return tuple(sorted(names[who] for who, times in said.items() if times >= 2))
