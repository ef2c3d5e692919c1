"""Which nodes are on one machine, and so share its line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dtfm.coordinator.log.ledger import Ledger


def machines_of(ledger: Ledger, nodes: Sequence[str]) -> list[list[int]]:
    """By machine, the places in ``nodes`` of those that are on it. They have one key, and reach each other over loopback: the key
    may be in a home folder of several machines, and who has another could say anything."""
    links, of_key = ledger.reach.links, defaultdict[str, list[list[int]]](list)

    def are_beside(one: str, other: str) -> bool:
        both = links.get(one, {}).get(other), links.get(other, {}).get(one)
        return any(link is not None and link.way == "loopback" for link in both)

    for place, node in enumerate(nodes):
        key = ledger.key_of(node) or node
        beside = [machine for machine in of_key[key] if any(are_beside(node, nodes[other]) for other in machine)]
        others = [machine for machine in of_key[key] if machine not in beside]
        of_key[key] = [*others, [*(other for machine in beside for other in machine), place]]
    return [machine for machines in of_key.values() for machine in machines]
