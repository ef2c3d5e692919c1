"""Which nodes share a machine: they are lost together, so their copies count as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dtfm.coordinator.log.ledger import Ledger


def machines(ledger: Ledger) -> Mapping[str, str]:
    """By member, its machine, which has one key for all its nodes.

    Where all members are on one machine no copy outlives it. There each counts as on a machine of its own: copies still outlive
    a process.
    """
    keys = {node: ledger.access.names[node].key if node in ledger.access.names else node for node in ledger.members}
    return keys if len(set(keys.values())) > 1 else {node: node for node in ledger.members}


def machines_of(machine: Mapping[str, str], nodes: Iterable[str]) -> frozenset[str]:
    """The machines of these nodes; ``machine``: see `machines`, which looks at every member, so call it outside of loops."""
    return frozenset(machine.get(node, node) for node in nodes)
