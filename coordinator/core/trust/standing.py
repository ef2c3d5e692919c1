"""Who has earned most, and who least."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.standing import standing_of


def weakest(ledger: Ledger, names: Iterable[str]) -> str:
    """The one of least standing among the names. Least is who has earned least (log/standing.py), then who took part in the
    fewest committed steps of this run, then who came last."""
    return min(sorted(names), key=standing(ledger))


def standing(ledger: Ledger) -> Callable[[str], tuple[int, int, int]]:
    """By name, the standing of its party: larger is more. See `weakest`."""
    steps: dict[str, int] = {}
    came: dict[str, int] = {}
    for number, (node, worked) in enumerate(ledger.trust.worked.items()):
        who = ledger.party(node)
        steps[who] = max(worked, steps.get(who, 0))
        came.setdefault(who, number)

    def of(name: str) -> tuple[int, int, int]:
        who = ledger.party(name)
        return standing_of(ledger, name), steps.get(who, 0), -came.get(who, len(ledger.trust.worked))

    return of
