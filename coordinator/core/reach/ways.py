"""Ways: how nodes reach each other, and which node relays if neither of two can dial the other.

Both ends of a pair try to dial the other: the newcomer when it measures its links, the earlier node when it is asked to. If
both can, nothing has to be decided. If one can, it lends connections to the other (dial-back). If neither can, both lend
connections to a relay, and borrow there. A way that does not work is replaced: dial-back by a relay, a relay by another relay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dtfm.coordinator.core.state.members import Dialled
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.links import check_reached
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair, pair_of, without_node
from dtfm.protos import control_pb2 as wire

NO_RELAY = "neither can dial the other, and no member that both reach relays; have one `join --relay`, or run `dtfm-node relay`"


def have_dialled(transition: Transition, session: Session, others: Iterable[Session]) -> None:
    """Has the others dial a newcomer. Forgets earlier results about it."""
    members, node = transition.state.members, session.node
    tried = {pair: relays for pair, relays in members.tried.items() if node not in pair}
    transition.set_members(replace(members, dialled=without_node(members.dialled, node), tried=tried))
    message = wire.CoordinatorMessage(reach=wire.Reach(peers=[_peer(transition.state.ledger, node)]))
    transition.send([other.node for other in others], message)


def probe(transition: Transition, node: str, peers: Iterable[Session]) -> None:
    """Has a node measure its links to the peers. Its reports about other nodes are ignored."""
    session, asked = transition.state.members.sessions[node], sorted(peers, key=lambda peer: peer.node)
    due = Counter(session.to_measure) + Counter(peer.node for peer in asked)
    transition.set_session(replace(session, to_measure=dict(due)))
    named = [_peer(transition.state.ledger, peer.node) for peer in asked]
    transition.send([node], wire.CoordinatorMessage(probe=wire.Probe(peers=named)))


def reached(transition: Transition, node: str, report: wire.Reached) -> None:
    """Takes the answer of a node that was asked to dial others."""
    before, new = transition.state.ledger.reach.ways, list[Pair]()
    for other, known in check_reached(report, node, transition.state.members.sessions).items():
        session = transition.state.members.sessions[other]
        if node not in session.reaching:
            transition.log(f"ignored that {node} has dialled {other}: it was not asked to")
            continue
        transition.set_session(replace(session, reaching=session.reaching - {node}))
        new += _know(transition, node, other, known)
    _use(transition, before, new)


def measured(transition: Transition, node: str, links: Iterable[ev.Link]) -> None:
    """Draws conclusions about ways from a node's measurements."""
    before, new = transition.state.ledger.reach.ways, list[Pair]()
    for link in links:
        if link.source != node:
            continue
        failed = link.bandwidth == 0
        if (way := transition.state.ledger.reach.ways.get(node, {}).get(link.destination)) is None:
            new += _know(transition, node, link.destination, Dialled(link.way, link.problem if failed else ""))
        elif failed:
            reason = f"{way.name} did not work: {link.problem}"
            new += _relay(transition, node, link.destination, reason, without=way.relay)
    _use(transition, before, new)


def arrived(transition: Transition, node: str) -> None:
    """Notes the direct ways of others to a node that plans are about to use."""
    ledger, dialled = transition.state.ledger, transition.state.members.dialled
    found = [
        ev.Way(source, node, known.way)
        for source, row in sorted(dialled.items())
        if (known := row.get(node)) is not None and known.way and node in ledger.reach.links.get(source, {})
    ]
    if found:
        transition.emit(ev.WaysChosen(tuple(found)))


def left(transition: Transition, node: str, before: Mapping[str, Mapping[str, ev.Way]]) -> None:
    """A node is gone. Its relayed traffic goes over other relays. ``before``: the ways while it was connected."""
    members = transition.state.members
    transition.set_members(replace(members, dialled=without_node(members.dialled, node)))
    new = list[Pair]()
    for source, row in sorted(before.items()):
        for destination, way in sorted(row.items()):
            if way.relay == node and source < destination and {source, destination} <= members.sessions.keys():
                new += _relay(transition, source, destination, f"relay {node} is gone")
    _use(transition, before, new)


def try_again(transition: Transition, node: str, peer: str) -> None:
    """A broken link is about to be measured again. A pair without a way may get a relay that has joined since."""
    ways, pair = transition.state.ledger.reach.ways, pair_of(node, peer)
    members = transition.state.members
    transition.set_members(replace(members, tried={p: relays for p, relays in members.tried.items() if p != pair}))
    known = (members.dialled.get(node, {}).get(peer), members.dialled.get(peer, {}).get(node))
    if peer in ways.get(node, {}) or not all(side is not None and side.problem for side in known):
        return
    if (relay := _pick(transition, pair)) is not None:
        _choose(transition, pair, relay, "neither can dial the other")
        _tell(transition)


def relay_came(transition: Transition) -> None:
    """A relay has joined: pairs that had no way may get one now."""
    members = transition.state.members
    for a, b in sorted(transition.state.ledger.reach.broken):
        if {a, b} <= members.sessions.keys():
            had = transition.state.ledger.reach.ways.get(a, {}).get(b)
            try_again(transition, a, b)
            if transition.state.ledger.reach.ways.get(a, {}).get(b) is not had:
                _measure(transition, [(a, b)])


def _use(transition: Transition, before: Mapping[str, Mapping[str, ev.Way]], new: Iterable[Pair]) -> None:
    """Tells nodes about ways that differ from ``before``, then has the first node of each ``new`` pair measure its links."""
    if transition.state.ledger.reach.ways is not before:
        _tell(transition)
    _measure(transition, new)


def _tell(transition: Transition) -> None:
    """Tells every node how it reaches others, and which nodes it lends to, if that has changed."""
    ledger = transition.state.ledger
    holders: dict[str, set[str]] = {}
    for source, row in ledger.reach.ways.items():
        for destination, way in row.items():
            holders.setdefault(destination, set()).add(way.relay or source)
    for node, session in sorted(transition.state.members.sessions.items()):
        row = ledger.reach.ways.get(node, {})
        ways = tuple((name, way.relay) for name, way in sorted(row.items()))
        told = (ways, tuple(sorted(holders.get(node, ()))))
        if told != session.told:
            transition.set_session(replace(session, told=told))
            transition.send([node], wire.CoordinatorMessage(ways=_message(ledger, told)))


def _know(transition: Transition, node: str, other: str, known: Dialled) -> list[Pair]:
    """One end of a pair has dialled the other. When both have, the pair gets its ways. Returns it if it is to be measured."""
    members = transition.state.members
    row = {**members.dialled.get(node, {}), other: known}
    transition.set_members(replace(members, dialled={**members.dialled, node: row}))
    back = members.dialled.get(other, {}).get(node)
    if back is None or not (known.problem or back.problem):
        return []
    if known.problem and back.problem:
        return _relay(transition, node, other, "neither can dial the other")
    source, destination = (node, other) if known.problem else (other, node)
    ways = transition.state.ledger.reach.ways
    if destination in ways.get(source, {}):
        return []
    reason = f"{source} cannot dial {destination}, which can dial {source}"
    transition.emit(ev.WaysChosen((ev.Way(source, destination, "dial-back", "", reason),)))
    link = transition.state.ledger.reach.links.get(source, {}).get(destination)
    return [(source, destination)] if link is None or link.bandwidth == 0 else []


def _relay(transition: Transition, node: str, other: str, reason: str, without: str = "") -> list[Pair]:
    """Has two nodes reach each other over a relay that they have not tried, if there is a relay. Returns the pair if the new way
    is to be measured."""
    pair, members = pair_of(node, other), transition.state.members
    if without:
        tried = {**members.tried, pair: members.tried.get(pair, frozenset()) | {without}}
        transition.set_members(replace(members, tried=tried))
    relay = _pick(transition, pair)
    if relay is None:
        ways = transition.state.ledger.reach.ways
        direct = tuple(ev.Way(a, b, "direct") for a, b in (pair, pair[::-1]) if b in ways.get(a, {}))
        if direct:
            transition.emit(ev.WaysChosen(direct))
        unusable = tuple(ev.Link(a, b, 0.0, 0.0, NO_RELAY) for a, b in (pair, pair[::-1]))
        transition.emit(ev.LinksMeasured(node, unusable))
        return []
    _choose(transition, pair, relay, reason)
    return [(node, other)]


def _choose(transition: Transition, pair: Pair, relay: str, reason: str) -> None:
    ways = tuple(ev.Way(a, b, "relay", relay, reason) for a, b in (pair, pair[::-1]))
    transition.emit(ev.WaysChosen(ways))


def _pick(transition: Transition, pair: Pair) -> str | None:
    """The least busy relay that the pair has not tried."""
    members = transition.state.members
    busy = Counter(way.relay for row in transition.state.ledger.reach.ways.values() for way in row.values())
    known = (
        node
        for node, member in transition.state.ledger.members.items()
        if member.relay and not member.leaving and node not in pair and node not in members.tried.get(pair, ())
    )
    return min(known, key=lambda node: (busy[node], node), default=None)


def _measure(transition: Transition, pairs: Iterable[Pair]) -> None:
    """Measures the links of pairs over their new ways. Plans do not use a newcomer before that is done."""
    peers: dict[str, list[str]] = {}
    for node, other in pairs:
        peers.setdefault(node, []).append(other)
    for node, others in peers.items():
        sessions = transition.state.members.sessions
        if (session := sessions[node]).admission is Admission.PROBING:
            transition.set_session(replace(session, probing=session.probing.union(others)))
        probe(transition, node, [sessions[other] for other in others])


def _message(ledger: Ledger, told: tuple[tuple[Pair, ...], tuple[str, ...]]) -> wire.Ways:
    ways, holders = told
    return wire.Ways(
        ways=[wire.Ways.Way(node=name, relay=_peer(ledger, relay) if relay else None) for name, relay in ways],
        holders=[_peer(ledger, holder) for holder in holders if holder in ledger.members],
    )


def _peer(ledger: Ledger, node: str) -> wire.Peer:
    return wire.Peer(node=node, candidates=ledger.members[node].candidates)
