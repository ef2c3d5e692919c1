"""Pairs of nodes that do not reach each other for now.

A connection needs both directions, so a pair works both ways or not at all. The link of a pair that fails gets no bandwidth
(Reach.broken), and plans leave it out, whichever node is to blame. The link is measured again after a lease. After each further
failure the pause doubles, up to an hour. If a pair has failed once and the run stands still, it is measured immediately. A pair
that works again may do so over a relay: reach/ways.py.
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.health import failing_nodes
from dtfm.coordinator.core.reach import ways
from dtfm.coordinator.core.state.members import Retry
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.health import LONGEST_PAUSE_LEASES
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import pair_of
from dtfm.coordinator.log.steps import PEER_LOST

MOST_NAMED = 3
"""A node that loses this number of other nodes between two commits most likely has a bad connection itself, and is left out. The
other nodes are not left out, whatever the node says."""


def lost(transition: Transition, node: str, peer: str, why: str) -> None:
    """The node says that it could not reach the peer. Plans leave out their link until it is measured again."""
    members, ledger = transition.state.members, transition.state.ledger
    if pair_of(node, peer) not in ledger.reach.broken:
        dead = (ev.Link(node, peer, 0.0, 0.0, why), ev.Link(peer, node, 0.0, 0.0, why))
        reason = f"its link with {peer} is not used until it is measured again: {why}"
        transition.emit(ev.LinksMeasured(node, dead, reason=reason))
    commits, named = members.lost.get(node, (0, frozenset[str]()))
    named = (named if commits == ledger.trust.commits else frozenset[str]()) | {peer}
    transition.set_members(replace(members, lost={**members.lost, node: (ledger.trust.commits, named)}))
    if len(named) >= MOST_NAMED and node in ledger.working:
        reason = f"it lost {', '.join(sorted(named))} one after the other, so that its own connection may be at fault"
        failing_nodes.failed(transition, node, PEER_LOST, reason)


def exchange(ledger: Ledger, node: str, peer: str) -> bool:
    """Whether the two nodes exchange tensors. Both must be in the plan, in the same stage or in neighbouring stages. With several
    islands, or parameters that are tied between layers, any two stages exchange tensors."""
    plan, described = ledger.training.in_force, ledger.description
    one, other = plan.stage_of(node), plan.stage_of(peer)
    if one is None or other is None or node == peer:
        return False
    near = abs(one - other) <= 1 or len(plan.islands) > 1
    return near or described.is_tied


def may_lose(ledger: Ledger, node: str, peer: str) -> bool:
    """Whether the two `exchange` tensors over a link that is in use."""
    return pair_of(node, peer) not in ledger.reach.broken and exchange(ledger, node, peer)


def measure_broken(transition: Transition) -> None:
    """The rule: has broken links measured again when that is due. If a link works, and breaks again before it has worked for as
    long as the next pause, the next pause follows."""
    state, now, first = transition.state, transition.now, transition.state.lease
    members, ledger = state.members, state.ledger
    if state.stopped or not (ledger.reach.broken or members.retries):
        return
    retries: dict[tuple[str, str], Retry] = {}
    for pair in ledger.reach.broken:
        known = members.retries.get(pair, Retry(now + first, first, is_first=True))
        retries[pair] = known if known.works_since is None else Retry(now + known.pause, known.pause)
    for pair, known in members.retries.items():
        since = now if known.works_since is None else known.works_since
        if pair not in retries and now <= since + known.pause:
            retries[pair] = replace(known, works_since=since)
    ready, at_once = set(ledger.ready), failing_nodes.stands_still(state)
    for node, peer in sorted(ledger.reach.broken):
        retry = retries[node, peer]
        if {node, peer} <= ready and (now >= retry.due or (at_once and retry.is_first)):
            ways.try_again(transition, node, peer)
            ways.probe(transition, node, [members.sessions[peer]])
            pause = min(2 * retry.pause, LONGEST_PAUSE_LEASES * state.lease)
            retries[node, peer] = Retry(now + pause, pause)
    if retries != members.retries:
        transition.set_members(replace(transition.state.members, retries=retries))
