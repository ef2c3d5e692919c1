"""The nodes and pairs that plans leave out for now: since when, and about when they are tried again. The ledger has no times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.health import LONGEST_PAUSE_LEASES
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import pair_of


@dataclass(frozen=True, slots=True)
class Out:
    """Since when plans leave out a node, or a pair, and about when it is tried again. Both are in seconds since 1970."""

    since: float
    again: float


@dataclass(frozen=True, slots=True)
class OutOfUse:
    """What plans leave out after the last event."""

    nodes: Mapping[str, Out] = field(default_factory=dict)
    """By node."""
    pairs: Mapping[str, Mapping[str, Out]] = field(default_factory=dict)
    """By the first node of a pair in order of name, then by the second."""

    def of(self, node: str) -> dict[str, Out]:
        """By other node, the pairs of this node."""
        seconds = {first: row[node] for first, row in self.pairs.items() if node in row}
        return dict(sorted({**seconds, **self.pairs.get(node, {})}.items()))

    def after(self, event: ev.Event, time: float, ledger: Ledger) -> OutOfUse:
        """``ledger``: after the event, which came at ``time``."""
        nodes = {node: out for node, out in self.nodes.items() if node in ledger.health and ledger.health[node].out}
        if isinstance(event, ev.NodeOutOfUse) and event.node in ledger.health:
            since = nodes[event.node].since if event.node in nodes else time
            nodes[event.node] = Out(since, time + event.seconds)
        pairs: dict[str, dict[str, Out]] = {}
        links = event.links if isinstance(event, ev.LinksMeasured) else ()
        tried = {pair_of(link.source, link.destination) for link in links}
        for one, other in sorted(ledger.reach.broken):
            out = self.pairs.get(one, {}).get(other)
            if out is None or (one, other) in tried:
                out = _failed(time if out is None else out.since, time, ledger)
            pairs.setdefault(one, {})[other] = out
        return OutOfUse(nodes, pairs)


def _failed(since: float, now: float, ledger: Ledger) -> Out:
    """A pair that works no more ``since`` then, and has failed again ``now``. Pauses double from a lease on, so that the next
    pause takes a lease more than all pauses before it together."""
    lease = float(ledger.run.get("cluster", {}).get("lease", 0.0))
    return Out(since, now + min(now - since + lease, LONGEST_PAUSE_LEASES * lease))
