"""Who is named to whom as having state. A node is believed only about the givers that were named to it.

The ledger has who got other state than those hold who trained it, and from whom: such nodes contradict each other
(Charge.STATE). They are named others, where there are any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger

Givers = tuple[tuple[str, ...], ...]
"""By layer, the nodes of which a node was told that they have its state; itself among them, if it has it. Empty: nobody has it,
and it comes from a snapshot or follows from the seed."""


def givers(ledger: Ledger, nodes: Iterable[str]) -> Mapping[str, Givers]:
    """For each of ``nodes``, of the state after the last committed step. Empty: part of it is held by nobody."""
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
    """Of those who hold some state: ``node``, if it does, and those from whom it may copy it. They are those whom nobody has
    contradicted about state, if there are any; else those whom it has not; else all. ``doubted``: see `_doubted`."""
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
    """From whom a node may have a bucket, if it was ``named`` these. Which layers use one that several share, from number
    ``layers`` on, is not known here."""
    of = slice(bucket, bucket + 1) if bucket < layers else slice(None)
    return frozenset(name for table in named for layer in table[of] for name in layer)


def _doubted(ledger: Ledger) -> frozenset[frozenset[str]]:
    """The sets of parties of which one is at fault that state differed: who had it and who gave it."""
    return frozenset(
        frozenset(map(ledger.party, each.nodes)) for each in ledger.trust.suspicions if each.said.charge is Charge.STATE
    )


def _named(ledger: Ledger, node: str, holders: Givers, doubted: frozenset[frozenset[str]]) -> Givers:
    """A party that once had something else from several, of which one broke off, is named one at a time, by turns, so that it can
    say which of them it was."""
    one_by_one = any(ledger.party(node) in parties and len(parties) > 2 for parties in doubted)
    found: dict[tuple[str, ...], tuple[str, ...]] = {}  # most layers are held by the same nodes as the one before
    for layer in holders:
        if layer not in found:
            named = believed(ledger, node, layer, doubted)
            others = [name for name in named if name != node] if one_by_one else []
            turn = others[ledger.training.generation % len(others)] if others else ""
            found[layer] = tuple(name for name in named if name in (node, turn)) if others else named
    return tuple(found[layer] for layer in holders)
