"""The nodes that are named to another node as holders of state. A node is believed only about givers that were named to it.

If a node got state that differs from the state of the nodes that trained it, the ledger has the node and its donors. They
contradict each other (Charge.STATE). Such a node is named other givers, if there are any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger

Givers = tuple[tuple[str, ...], ...]
"""By layer, the nodes that a node was told to have the layer's state; the node itself is among them if it has it. Empty: nobody
has the state. Then it comes from a snapshot, or follows from the seed."""


def givers(ledger: Ledger, nodes: Iterable[str]) -> Mapping[str, Givers]:
    """For each of ``nodes``, the givers of the state after the last committed step. Empty if nobody holds some part of it."""
    if ledger.training.step == 0 or not ledger.state_is_held:
        return {}
    doubted, tables = _doubted(ledger), dict[int | None, Givers]()
    named: dict[str, Givers] = {}
    for node in nodes:
        if (island := ledger.source_of(node)) not in tables:
            tables[island] = ledger.holders_in(island)
        named[node] = _named(ledger, node, tables[island], doubted) if doubted else tables[island]
    return named


def believed(
    ledger: Ledger, node: str, holders: Sequence[str], doubted: Collection[frozenset[str]] | None = None
) -> tuple[str, ...]:
    """The ``holders`` of some state that ``node`` may copy from, and ``node`` itself if it is a holder. These are the holders
    that nobody has contradicted about state. If there are none: the holders that ``node`` has not contradicted. If there are
    none either: all. ``doubted``: see `_doubted`."""
    doubted = _doubted(ledger) if doubted is None else doubted
    if not doubted:
        return tuple(holders)
    party = ledger.party
    by_all = frozenset[str]().union(*doubted)
    by_node = frozenset[str]().union(*(parties for parties in doubted if party(node) in parties and len(parties) == 2))
    for left_out in (by_all, by_node):
        if others := [holder for holder in holders if holder != node and party(holder) not in left_out]:
            return tuple(holder for holder in holders if holder == node or holder in others)
    return tuple(holders)


def could_name(named: Collection[Givers], bucket: int, layers: int) -> frozenset[str]:
    """The nodes that may have given a node a bucket, if it was ``named`` these givers. Buckets from number ``layers`` on are
    shared, and which layers use them is not known here."""
    of = slice(bucket, bucket + 1) if bucket < layers else slice(None)
    return frozenset(name for table in named for layer in table[of] for name in layer)


def _doubted(ledger: Ledger) -> frozenset[frozenset[str]]:
    """The sets of parties where one is at fault that state differed: the receiver and its givers."""
    return frozenset(
        frozenset(map(ledger.party, each.nodes)) for each in ledger.trust.suspicions if each.said.charge is Charge.STATE
    )


def _named(ledger: Ledger, node: str, holders: Givers, doubted: frozenset[frozenset[str]]) -> Givers:
    """The givers for a node. If its party once had wrong state from several givers, it is named one giver at a time, by turns, so
    that it can say which giver it was."""
    one_by_one = any(ledger.party(node) in parties and len(parties) > 2 for parties in doubted)
    found: dict[tuple[str, ...], tuple[str, ...]] = {}  # most layers are held by the same nodes as the one before
    for layer in holders:
        if layer not in found:
            named = believed(ledger, node, layer, doubted)
            others = [name for name in named if name != node] if one_by_one else []
            turn = others[ledger.training.generation % len(others)] if others else ""
            found[layer] = tuple(name for name in named if name in (node, turn)) if others else named
    return tuple(found[layer] for layer in holders)
