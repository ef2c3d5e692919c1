"""Who gives state to whom: the one table that assignments name, and by which what comes of them is judged.

A node is believed only about the givers that were named to it. The ledger has who got other state than those hold who trained
it, and from whom (Ledger.refused). Then that node, and others, are named other givers, where there are any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.standing import Standing, earned

Givers = tuple[tuple[str, ...], ...]
"""By layer, the nodes of which a node was told that they have its state; itself among them, if it has it. Empty: nobody has it,
and it comes from a snapshot or follows from the seed."""


def givers(ledger: Ledger, nodes: Iterable[str]) -> Mapping[str, Givers]:
    """For each of ``nodes``, of the state after the last committed step. Empty: part of it is held by nobody.

    Whoever once got something else from several, of which one broke off, is named one at a time, by turns, so that it can say
    which of them it was.
    """
    if ledger.training.step == 0 or not ledger.state_is_held:
        return {}
    holders = ledger.holders
    return {node: _named(ledger, node, holders) if ledger.trust.refused else holders for node in nodes}


def believed(ledger: Ledger, node: str, holders: Sequence[str]) -> tuple[str, ...]:
    """Of those who hold some state: ``node``, if it does, and those from whom it may copy it. They are those whom nobody has
    accused of handing out something else, if there are any; else those whom it has not accused itself; else those whom it has not
    accused alone; else all."""
    if not ledger.trust.refused:
        return tuple(holders)
    party = party_of(ledger)
    accused = {party(donor) for _, donors in ledger.trust.refused for donor in donors}
    by_node = {party(donor) for who, donors in ledger.trust.refused if party(who) == party(node) for donor in donors}
    for doubted in (accused, by_node, has_accused(ledger, node)):
        if others := [holder for holder in holders if holder != node and party(holder) not in doubted]:
            return tuple(holder for holder in holders if holder == node or holder in others)
    return tuple(holders)


def could_name(named: Collection[Givers], bucket: int, layers: int) -> frozenset[str]:
    """From whom a node may have a bucket, if it was ``named`` these. Which layers use one that several share, from number
    ``layers`` on, is not known here."""
    of = slice(bucket, bucket + 1) if bucket < layers else slice(None)
    return frozenset(name for table in named for layer in table[of] for name in layer)


def only_givers(ledger: Ledger, named: Mapping[str, Givers], nodes: Collection[str]) -> frozenset[str]:
    """The nodes of each party that alone was ``named`` to one of ``nodes`` for some of its state. Where it was named several
    parties it has a choice, and none of them is to blame."""
    assert ledger.training.plan is not None
    party, only = party_of(ledger), set[str]()
    for stage in ledger.training.plan.stages:
        for node in set(nodes).intersection(stage.replicas):
            for holders in named.get(node, ())[slice(*stage.layers)]:
                if node not in holders and len(set(map(party, holders))) == 1:
                    only.update(holders)
    return frozenset(only)


def accusers(ledger: Ledger, donor: str) -> tuple[str, ...]:
    """Who says that this donor gave it something else, a name for each party, and is heard: it has accused nobody before, is not
    quarantined, and has earned as much as the donor."""
    party, least = party_of(ledger), max(earned(ledger, donor).standing, Standing.SUSPECTED)
    first: dict[str, tuple[str, str]] = {}
    for node, donors in ledger.trust.refused:
        if len({party(each) for each in donors}) == 1:
            first.setdefault(party(node), (node, party(donors[0])))
    return tuple(
        sorted(
            node
            for who, (node, accused) in first.items()
            if accused == party(donor) != who and earned(ledger, node).standing >= least
        )
    )


def has_accused(ledger: Ledger, node: str) -> frozenset[str]:
    """The parties from each of which alone the node, or another of its party, had something else."""
    party = party_of(ledger)
    found = ({party(donor) for donor in donors} for who, donors in ledger.trust.refused if party(who) == party(node))
    return frozenset().union(*(whose for whose in found if len(whose) == 1))


def has_mixed(ledger: Ledger, node: str) -> bool:
    """Whether the node's party had something else of which it could not say whose it was."""
    party = party_of(ledger)
    return any(
        party(who) == party(node) and len({party(donor) for donor in donors}) > 1
        for who, donors in ledger.trust.refused
    )


def _named(ledger: Ledger, node: str, holders: Givers) -> Givers:
    one_by_one = has_mixed(ledger, node)
    found: dict[tuple[str, ...], tuple[str, ...]] = {}  # most layers are held by the same nodes as the one before
    for layer in holders:
        if layer not in found:
            named = believed(ledger, node, layer)
            others = [name for name in named if name != node] if one_by_one else []
            turn = others[ledger.training.generation % len(others)] if others else ""
            found[layer] = tuple(name for name in named if name in (node, turn)) if others else named
    return tuple(found[layer] for layer in holders)
