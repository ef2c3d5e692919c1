"""Who is there: joining, preparing, measuring links, leases, leaving."""

from __future__ import annotations

import math
import random
from collections import Counter

from dtfm.coordinator.core import snapshot
from dtfm.coordinator.core.replanning import consider
from dtfm.coordinator.core.standby import keep_up
from dtfm.coordinator.core.state import (
    LONGEST_WAVE_LEASES,
    MOST_PROBED,
    PROBE_LEASES,
    REMEMBERED_LEASES,
    SIGN_OF_LIFE_LEASES,
    TOGETHER_LEASES,
    Contender,
    Mending,
    Remembered,
    Session,
    Standing,
)
from dtfm.coordinator.core.steps import node_lost
from dtfm.coordinator.core.transition import Admit, HangUp, Turn
from dtfm.coordinator.core.validation import (
    MAX_NODES,
    Refused,
    check_agrees,
    check_connection,
    check_hello,
    check_links,
    check_prepared,
    shorten,
)
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.connection import read_address


def greeted(turn: Turn, stream: int, message: wire.NodeMessage, shows_token: bool) -> None:
    """A stream's first message: a hello is welcomed, or refused by name."""
    hello = message.hello
    named = shorten(hello.node, 64)
    state = turn.state
    if not shows_token:
        sentence = "the token is missing or wrong; give the coordinator's with --token-file or DTFM_TOKEN"
        turn.refuse(stream, named, wire.TOKEN, sentence)
        return
    if message.WhichOneof("message") != "hello":
        turn.refuse(stream, "", wire.MALFORMED, "the first message is not Hello; update dtfm on the node")
        return
    try:
        device = check_hello(hello, state.run, state.ledger.run_id)
    except Refused as refused:
        turn.refuse(stream, named, refused.reason, str(refused))
        return
    if state.ledger.outcome is not None:
        turn.refuse(stream, named, wire.RUN_OVER, f"the run is over: {state.ledger.outcome.reason}")
        return
    reason = "first contact"
    if (old := state.sessions.get(hello.node)) is not None:
        if old.incarnation != hello.incarnation:
            _contend(turn, stream, hello, old)
            return
        turn.commands.append(HangUp(old.stream))
        leave(turn, old, "its stream was replaced by a newer one")
        reason = "reconnected"
    elif len(state.sessions) >= MAX_NODES:
        turn.refuse(stream, named, wire.FULL, f"this coordinator has {MAX_NODES} nodes, as many as it takes")
        return
    if turn.state.ledger.outcome is not None:  # the replaced stream may have ended the run
        turn.refuse(stream, named, wire.RUN_OVER, f"the run is over: {turn.state.ledger.outcome.reason}")
        return
    incarnation = f"{hello.incarnation:016x}"
    turn.emit(ev.NodeJoined(hello.node, reason, hello.address, device, shorten(hello.package_version), incarnation))
    turn.update(Session(hello.node, stream, hello.incarnation, hello.address, turn.now))
    welcome = wire.Welcome(run=state.message, heartbeat_seconds=state.heartbeat)
    turn.commands.append(Admit(stream, hello.node, hello.signing_request, welcome))


def prepared(turn: Turn, session: Session, message: wire.Prepared) -> None:
    """The node has read the run. The first one defines what is trained; the others must agree. Then it measures its links
    to all that came before."""
    if session.standing is not Standing.JOINED:
        turn.log(f"ignored a second Prepared of {session.node}")
        return
    described = check_prepared(message, turn.state.run)
    if turn.state.ledger.described is None:
        turn.emit(ev.RunDescribed(described))
    else:
        check_agrees(described, turn.state.ledger.described)
    if message.flops and message.flops != turn.state.ledger.members[session.node].device.flops:
        turn.emit(ev.DeviceTimed(session.node, message.flops))
    snapshot.claimed(turn, session, message.kept)
    session = turn.state.sessions[session.node]
    others = sorted(
        (s for s in turn.state.sessions.values() if s.standing is not Standing.JOINED), key=lambda s: s.node
    )
    known = _remembered_links(turn, session)
    if known:
        turn.emit(ev.LinksMeasured(session.node, known))
        measured = {node for link in known for node in (link.source, link.destination)}
        others = [other for other in others if other.node not in measured]
    # Drawn by name, so that every node has links that were measured, and a replay draws the same.
    peers = random.Random(session.node).sample(others, min(len(others), MOST_PROBED))
    patience = SIGN_OF_LIFE_LEASES * turn.state.lease
    lively = [peer for peer in peers if turn.now - peer.heard <= patience]
    if lively:
        turn.update(session, standing=Standing.PROBING, probe_until=turn.now + PROBE_LEASES * turn.state.lease)
        _probe(turn, session.node, lively)
    else:
        _arrive(turn, session)
    silent = [peer for peer in peers if peer not in lively]
    if silent:  # asked for apart, so that nobody waits for an answer of theirs
        _probe(turn, session.node, silent)


def links_measured(turn: Turn, session: Session, report: wire.LinkReport) -> None:
    links = check_links(report, session.node, turn.state.sessions)
    broken = turn.state.ledger.broken
    for link in links:
        if link.problem:
            turn.log(f"link {link.source} to {link.destination}: {link.problem}")
    if links:
        up, down = check_connection(report)
        turn.emit(ev.LinksMeasured(session.node, links, up=up, down=down))
    if session.standing is Standing.PROBING:
        _arrive(turn, session)
    elif session.standing is Standing.READY and broken - turn.state.ledger.broken:  # there is more to plan with
        turn.set(considered=turn.state.considered - {session.node})
        consider(turn)


def closed(turn: Turn, stream: int, reason: str) -> None:
    """A stream has ended, whoever's it was."""
    contenders = {node: c for node, c in turn.state.contenders.items() if c.stream != stream}
    turn.set(contenders=contenders)
    if session := turn.state.session_of(stream):
        leave(turn, session, reason)


def leave(turn: Turn, session: Session, reason: str, *, for_good: bool = False) -> None:
    """The node is gone, for whatever reason; training goes on without it. ``for_good``: it has ended, with all that it had."""
    plan, chosen = turn.state.ledger.plan, turn.state.chosen
    _remember_links(turn, session)
    turn.set(sessions={node: s for node, s in turn.state.sessions.items() if node != session.node})
    turn.emit(ev.NodeLeft(session.node, reason))
    left = {node: then for node, then in turn.state.left.items() if node != session.node}
    for oldest in list(left)[: max(len(left) + 1 - MAX_NODES, 0)]:
        del left[oldest]
    left[session.node] = -math.inf if for_good else turn.now
    turn.set(considered=turn.state.considered - {session.node}, left=left)
    if chosen is not None and session.node in chosen.plan.nodes:
        turn.set(chosen=None, considered=frozenset())
    if not turn.state.stopped:
        if plan is not None and session.node in plan.nodes:
            node_lost(turn, session.node, reason)
        else:
            consider(turn)
            keep_up(turn)
        snapshot.left(turn, session.node)
    if (contender := turn.state.contenders.get(session.node)) is not None:
        turn.set(contenders={node: c for node, c in turn.state.contenders.items() if node != session.node})
        greeted(turn, contender.stream, wire.NodeMessage(hello=contender.hello), True)


def lapse(turn: Turn) -> None:
    """Leases that ran out, identities that two claim, link reports that are overdue, and newcomers that have waited for
    others long enough."""
    _look_at_the_clock(turn)
    for session in sorted(turn.state.sessions.values(), key=lambda s: s.node):
        if turn.now - max(session.heard, turn.state.hearing) > turn.state.lease:
            turn.commands.append(HangUp(session.stream))
            leave(turn, session, f"no sign of life for {turn.state.lease:g} seconds")
        elif session.standing is Standing.PROBING and turn.now > session.probe_until:
            turn.log(f"{session.node} did not report its links in time; they count as average ones")
            _arrive(turn, session)
    _decide_contests(turn)
    if turn.state.stopped:
        return
    arrived = [s.arrived for s in turn.state.sessions.values() if s.standing is Standing.ARRIVED]
    lease = turn.state.lease
    if arrived and (
        turn.now - max(arrived) >= TOGETHER_LEASES * lease or turn.now - min(arrived) >= LONGEST_WAVE_LEASES * lease
    ):
        _let_in(turn)
    _measure_broken_links(turn)


def _look_at_the_clock(turn: Turn) -> None:
    """Where this process was held up itself (suspended, swapped out, busy), what nodes said meanwhile is still to be read:
    their silence counts from now."""
    if turn.now - turn.state.looked > SIGN_OF_LIFE_LEASES * turn.state.lease:
        turn.set(hearing=turn.now)
    turn.set(looked=turn.now)


def _arrive(turn: Turn, session: Session) -> None:
    """The node can be planned with: at once where it completes those that the run awaits, else with all others that come
    in the same moment."""
    state = turn.state
    turn.update(session, standing=Standing.ARRIVED, arrived=turn.now)
    here = sum(s.standing in (Standing.ARRIVED, Standing.READY) for s in turn.state.sessions.values())
    if not state.gathered and here >= state.run.cluster.nodes:
        _let_in(turn)


def _let_in(turn: Turn) -> None:
    for session in sorted(turn.state.sessions.values(), key=lambda s: s.node):
        if session.standing is Standing.ARRIVED:
            turn.update(session, standing=Standing.READY)
            turn.emit(ev.NodeReady(session.node))
    consider(turn)


def _remember_links(turn: Turn, session: Session) -> None:
    """Those of a node that is about to leave."""
    rows = turn.state.ledger.links
    links = (*rows.get(session.node, {}).values(), *(row[session.node] for row in rows.values() if session.node in row))
    ends = {session.node}.union(*((link.source, link.destination) for link in links))
    hosts = {node: _host(other) for node, other in turn.state.sessions.items() if node in ends}
    kept = {node: old for node, old in turn.state.remembered.items() if turn.now <= old.until and node != session.node}
    for oldest in list(kept)[: max(len(kept) + 1 - MAX_NODES, 0)]:
        del kept[oldest]
    until = turn.now + REMEMBERED_LEASES * turn.state.lease
    turn.set(remembered={**kept, session.node: Remembered(until, hosts, links)})


def _remembered_links(turn: Turn, session: Session) -> tuple[ev.Link, ...]:
    """Links between a node that came back and others, both ways, if all are on the hosts where they were."""
    old = turn.state.remembered.get(session.node)
    if old is None or turn.now > old.until or old.hosts[session.node] != _host(session):
        return ()
    others = [other for other in turn.state.sessions.values() if other.standing is not Standing.JOINED]
    here = {other.node for other in others if old.hosts.get(other.node) == _host(other)}
    usable = [link for link in old.links if link.bandwidth > 0 and here & {link.source, link.destination}]
    ways = Counter(frozenset((link.source, link.destination)) for link in usable)
    return tuple(link for link in usable if ways[frozenset((link.source, link.destination))] == 2)


def _host(session: Session) -> str:
    return read_address(session.address)[0]


def _probe(turn: Turn, node: str, peers: list[Session]) -> None:
    named = [wire.Peer(node=s.node, address=s.address) for s in sorted(peers, key=lambda s: s.node)]
    turn.send([node], probe=wire.Probe(peers=named))


def _measure_broken_links(turn: Turn) -> None:
    """Links that could not be used are measured again, at ever longer intervals, in case they can."""
    first = PROBE_LEASES * turn.state.lease
    mending = {
        pair: turn.state.mending.get(pair, Mending(turn.now + first, 2 * first)) for pair in turn.state.ledger.broken
    }
    ready = set(turn.state.ready)
    for (node, peer), link in sorted(mending.items()):
        if turn.now >= link.due and {node, peer} <= ready:
            _probe(turn, node, [turn.state.sessions[peer]])
            mending[node, peer] = Mending(turn.now + link.pause, 2 * link.pause)
    if mending != turn.state.mending:
        turn.set(mending=mending)


def _contend(turn: Turn, stream: int, hello: wire.Hello, old: Session) -> None:
    """Another process claims a node's identity: whether it is that node, started again, shows in whether the old process
    still gives signs of life."""
    other = turn.state.contenders.get(hello.node)
    if other is not None and other.hello.incarnation != hello.incarnation:
        turn.refuse(stream, hello.node, wire.IDENTITY_IN_USE, _in_use(old))
        return
    if other is not None:
        turn.commands.append(HangUp(other.stream))
    turn.set(contenders={**turn.state.contenders, hello.node: Contender(stream, hello, turn.now)})


def _decide_contests(turn: Turn) -> None:
    for node, contender in sorted(turn.state.contenders.items()):
        old = turn.state.sessions[node]
        if old.heard > contender.since:
            turn.set(contenders={n: c for n, c in turn.state.contenders.items() if n != node})
            turn.refuse(contender.stream, node, wire.IDENTITY_IN_USE, _in_use(old))
        elif turn.now - max(contender.since, turn.state.hearing) > SIGN_OF_LIFE_LEASES * turn.state.lease:
            turn.commands.append(HangUp(old.stream))
            leave(turn, old, "a new process has its identity, and this one gave no sign of life since")


def _in_use(old: Session) -> str:
    return (
        f"another process has the identity {old.node!r} and is alive (at {old.address}); give this one its own with --id, or "
        f"end the other"
    )
