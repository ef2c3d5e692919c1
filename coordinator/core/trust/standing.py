"""Parties, and whose word weighs more.

A party is whoever holds a key: all names of the key speak with one voice, and are bound together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.standing import earned


def is_alone(ledger: Ledger) -> bool:
    """Whether all members, and nodes of the plan, belong to one party, and among strangers also all who ever took part in a step:
    then there is nobody to be protected from it. Who shares a run with people it knows may so end it while they are away, as it
    must be able to if it goes on with it alone. A stranger may not. Whose the revoked names were is not known any more."""
    nodes = [*ledger.members, *(ledger.training.plan.nodes if ledger.training.plan is not None else ())]
    if ledger.is_open:
        nodes += [node for node, steps in ledger.trust.worked.items() if steps and node not in ledger.access.revoked]
    return len({ledger.party(node) for node in nodes}) <= 1


def party_of(ledger: Ledger) -> Callable[[str], str]:
    """By name, its party: its key, or the name itself where none is known. Of a party that is alone each name counts for itself,
    so that one broken device does not speak for all."""
    if is_alone(ledger):
        return lambda name: name
    return ledger.party


def weakest(ledger: Ledger, names: Iterable[str]) -> str:
    """The one of least standing among the names. Least is who has earned least (log/standing.py), then whose standing has
    had others quarantined more often, then who took part in the fewest committed steps of this run, then who came last."""
    of = standing(ledger)
    return min(sorted(names), key=of)


def standing(ledger: Ledger) -> Callable[[str], tuple[int, int, int, int]]:
    """By name, the standing of its party: larger is more. See `weakest`."""
    party = party_of(ledger)
    disputes = Counter(
        who for why in ledger.trust.quarantined.values() if why.weighed for who in {party(name) for name in why.against}
    )
    steps: dict[str, int] = {}
    came: dict[str, int] = {}
    for number, (node, worked) in enumerate(ledger.trust.worked.items()):
        who = party(node)
        steps[who] = max(worked, steps.get(who, 0))
        came.setdefault(who, number)

    def of(name: str) -> tuple[int, int, int, int]:
        who = party(name)
        return (
            earned(ledger, name).standing,
            -disputes[who],
            steps.get(who, 0),
            -came.get(who, len(ledger.trust.worked)),
        )

    return of
