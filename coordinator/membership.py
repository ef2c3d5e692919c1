"""Who is there: joining, preparing, measuring links, leases, leaving."""

from __future__ import annotations

from dtfm.coordinator import events as ev
from dtfm.coordinator.checks import MAX_NODES, Refused, check_agrees, check_hello, check_links, check_prepared, shorten
from dtfm.coordinator.state import PROBE_LEASES, Session, Standing
from dtfm.coordinator.stepping import node_lost
from dtfm.coordinator.switching import consider
from dtfm.coordinator.turn import HangUp, Turn
from dtfm.protos import control_pb2 as wire


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
            turn.refuse(stream, named, wire.IDENTITY_IN_USE, _in_use(turn, old))
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
    welcome = wire.Welcome(run=state.message, heartbeat_seconds=state.heartbeat, peer_token=state.peer_token)
    turn.send([hello.node], welcome=welcome)


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
    peers = [s for s in turn.state.sessions.values() if s.standing is not Standing.JOINED]
    if not peers:
        _ready(turn, session)
        return
    turn.update(session, standing=Standing.PROBING, probe_until=turn.now + PROBE_LEASES * turn.state.lease)
    probe = wire.Probe(peers=[wire.Peer(node=s.node, address=s.address) for s in sorted(peers, key=lambda s: s.node)])
    turn.send([session.node], probe=probe)


def links_measured(turn: Turn, session: Session, report: wire.LinkReport) -> None:
    links = check_links(report, session.node, turn.state.sessions)
    for link in links:
        if link.problem:
            turn.log(f"link {link.source} to {link.destination}: {link.problem}")
    if links:
        turn.emit(ev.LinksMeasured(session.node, links))
    if session.standing is Standing.PROBING:
        _ready(turn, session)


def leave(turn: Turn, session: Session, reason: str) -> None:
    """The node is gone, for whatever reason; training goes on without it."""
    plan, chosen = turn.state.ledger.plan, turn.state.chosen
    turn.set(sessions={node: s for node, s in turn.state.sessions.items() if node != session.node})
    turn.emit(ev.NodeLeft(session.node, reason))
    turn.set(
        considered=turn.state.considered - {session.node},
        chosen=None if chosen is not None and session.node in chosen.plan.nodes else chosen,
    )
    if turn.state.stopped:
        return
    if plan is not None and session.node in plan.nodes:
        node_lost(turn, session.node, reason)
    else:
        consider(turn)


def lapse(turn: Turn) -> None:
    """Leases that ran out, and link reports that are overdue."""
    for session in sorted(turn.state.sessions.values(), key=lambda s: s.node):
        if turn.now - session.heard > turn.state.lease:
            turn.commands.append(HangUp(session.stream))
            leave(turn, session, f"no sign of life for {turn.state.lease:g} seconds")
        elif session.standing is Standing.PROBING and turn.now > session.probe_until:
            turn.log(f"{session.node} did not report its links in time; they count as average ones")
            _ready(turn, session)


def _ready(turn: Turn, session: Session) -> None:
    turn.update(session, standing=Standing.READY)
    turn.emit(ev.NodeReady(session.node))
    consider(turn)


def _in_use(turn: Turn, old: Session) -> str:
    left = max(0.0, turn.state.lease - (turn.now - old.heard))
    return (
        f"another live process has the identity {old.node!r} (at {old.address}); give this one its own with --id, or, if "
        f"the other is gone, try again in {left:.0f} seconds"
    )
