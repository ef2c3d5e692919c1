"""What events do to members, and to what is remembered of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.effects.links import but
from dtfm.coordinator.log.ledger import (
    Ledger,
)

MOST_FAILURES = 100
"""The number of failed checkpoints in a row of which it is remembered because of whom, and of attempts that waited in vain."""

MOST_KNOWN = 20_000
"""The number of nodes whose steps are remembered. From then on one that is no member is forgotten for each new one: that with the
fewest steps, of several the one that came last. So nobody loses what it has earned by others' coming and going."""


def with_beginners(ledger: Ledger, event: ev.StepCommitted, nodes: Iterable[str]) -> Mapping[str, int]:
    new = {ledger.party(node) for node in nodes} - ledger.began.keys()
    began = {**ledger.began, **dict.fromkeys(sorted(new), event.step - 1)}
    return dict(list(began.items())[-MOST_KNOWN:]) if new else ledger.began


def with_newcomer(worked: Mapping[str, int], node: str, members: Collection[str]) -> Mapping[str, int]:
    """Whose steps are remembered once this node has come."""
    if node in worked:
        return worked
    gone = [other for other in worked if other not in members] if len(worked) >= MOST_KNOWN else []
    forgotten = min(reversed(gone), key=lambda other: worked[other], default=None)
    return {**{other: steps for other, steps in worked.items() if other != forgotten}, node: 0}


def with_waiting(ledger: Ledger, event: ev.StepAborted | ev.PlanFailed) -> Ledger:
    suspects = frozenset(event.suspects or (event.node,))
    return replace(ledger, waited_for=(*ledger.waited_for, suspects)[-MOST_FAILURES:])


def without_members(ledger: Ledger) -> Ledger:
    """Without members. Those that return still have what they had."""
    return replace(ledger, members={}, links={}, broken=frozenset(), ways={}, plan=None)


def without_member(ledger: Ledger, node: str) -> Ledger:
    return replace(
        ledger,
        members={name: member for name, member in ledger.members.items() if name != node},
        links={source: but(row, node) for source, row in ledger.links.items() if source != node},
        broken=frozenset(pair for pair in ledger.broken if node not in pair),
        ways={source: but(row, node) for source, row in ledger.ways.items() if source != node} if ledger.ways else {},
        peer_losses=tuple(pair for pair in ledger.peer_losses if node not in pair),
        waited_for=tuple(suspects - {node} for suspects in ledger.waited_for),
        evaded=with_evaded(ledger, node),
    )


def with_evaded(ledger: Ledger, node: str) -> Mapping[str, int]:
    """With the last attempts in a row that waited for this node, which leaves."""
    times = next((n for n, suspects in enumerate(reversed(ledger.waited_for)) if node not in suspects), None)
    if not (times := len(ledger.waited_for) if times is None else times):
        return ledger.evaded
    others = {other: before for other, before in ledger.evaded.items() if other != node}
    return dict(list({**others, node: ledger.evaded.get(node, 0) + times}.items())[-MOST_KNOWN:])
