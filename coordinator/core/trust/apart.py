"""Which pairs of nodes are kept apart, and who is outweighed by those that accuse it.

If two nodes lose each other, or do not say the same of what passed between them, either may be at fault, or the line between
them. So plans do without the pair for a while (core/links.py), and nobody is quarantined for it. Otherwise newcomers could throw
out whoever they name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from dtfm.coordinator.core.state import ATTEMPTS, State
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.coordinator.log.standing import earned
from dtfm.scheduler.model.plan import Plan

MOST_LOSSES = 2 * ATTEMPTS - 1
"""The number of attempts in a row that may fail as nodes lose each other, whoever they are."""

LEAST_VOICES = 3
"""The number of parties that must accuse a node of the same step. Two that agree may be one."""


def may_lose(ledger: Ledger, node: str, peer: str) -> bool:
    """Whether a stream between the two can break: both are in the plan, in the same stage or in neighbouring ones, or in any two
    where parameters are tied between layers; and they are not kept apart already."""
    plan, described = ledger.training.plan, ledger.described
    assert plan is not None
    assert described is not None
    one, other = plan.stage_of(node), plan.stage_of(peer)
    if one is None or other is None or node == peer or pair_of(node, peer) in ledger.reach.broken:
        return False
    return abs(one - other) <= 1 or described.buckets > len(described.workload.layers)


def lost_too_often(ledger: Ledger) -> tuple[Pair, ...]:
    """The pairs that have lost each other ATTEMPTS times since the last commit; after MOST_LOSSES of all kinds every pair that
    did. So no member holds up a step for longer than that, whomever it names."""
    times = Counter(pair_of(node, peer) for node, peer in ledger.trust.peer_losses)
    least = 1 if times.total() >= MOST_LOSSES else ATTEMPTS
    return tuple(sorted(pair for pair, count in times.items() if count >= least))


def outweighed(state: State, accused: str, accusers: Collection[str]) -> bool:
    """Whether the word of the ``accusers`` counts against the accused: LEAST_VOICES parties at least, and more than half of
    those that the accused has to do with under this plan, each of standing at least its own. Parties that come from one address
    have one voice."""
    ledger = state.ledger
    plan = ledger.training.plan
    assert plan is not None
    party, least = party_of(ledger), earned(ledger, accused).standing
    heard = {_voice(state, party, each) for each in accusers if earned(ledger, each).standing >= least}
    others = {party(each) for each in _neighbours(plan, accused)} - {party(accused)}
    return len(heard) >= LEAST_VOICES and 2 * len(heard) > len(others)


def _voice(state: State, party: Callable[[str], str], node: str) -> str:
    session = state.members.sessions.get(node)
    return session.origin if session is not None and session.origin else party(node)


def _neighbours(plan: Plan, node: str) -> frozenset[str]:
    """The other replicas of its stage, and whoever it exchanges micro-batches with."""
    own = plan.stages[plan.stage_of(node) or 0].replicas
    ends = {(flow.sender, flow.receiver) for flows in plan.flows for flow in flows}
    beside = {each for pair in ends if node in pair for each in pair}
    return frozenset({*own, *beside} - {node})
