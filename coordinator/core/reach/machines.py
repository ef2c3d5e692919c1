"""Groups nodes by machine. Nodes on one machine share its line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dtfm.coordinator.log.ledger import Ledger


def machines_of(ledger: Ledger, nodes: Sequence[str]) -> list[list[int]]:
    """By machine, the places in ``nodes`` of the nodes on it. Such nodes have one key and reach each other over loopback. The key
    alone is not enough, as several machines may share a home folder; and nodes with other keys could claim anything."""
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
