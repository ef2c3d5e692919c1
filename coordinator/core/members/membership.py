"""Membership: joining, preparing, becoming ready, leases, and names that two processes claim."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address

from dtfm.coordinator.core.copies import disks
from dtfm.coordinator.core.ending import tell_end
from dtfm.coordinator.core.members import describing, welcoming
from dtfm.coordinator.core.members.leaving import leave, send_home
from dtfm.coordinator.core.members.quarantine import refusal_of
from dtfm.coordinator.core.plan import precision, slow_lines
from dtfm.coordinator.core.reach import links, ways
from dtfm.coordinator.core.refusal import Refused, shorten
from dtfm.coordinator.core.state.session import Admission, Session, Work
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import LONGEST_WAVE_LEASES, PROBE_LEASES, SIGN_OF_LIFE_LEASES, TOGETHER_LEASES
from dtfm.coordinator.core.transition import Certify, HangUp, Transition
from dtfm.coordinator.core.validation.admission import MAX_NODES, check_candidates, check_hello
from dtfm.coordinator.core.validation.description import check_pins, check_prepared
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire, plan_pb2
from dtfm.protos.candidates import origin_of
from dtfm.protos.identity.credentials import CERTIFICATE_LIFETIME
from dtfm.protos.run_file.run_file import PRECISIONS

PREPARING: Mapping[int, ev.Preparing] = {
    wire.LOADING_MODEL: "loads the model",
    wire.READING_DATA: "reads data",
    wire.COMPILING: "compiles",
    wire.TIMING_DEVICE: "times its device",
    wire.MEASURING_LINKS: "measures links",
}
MOST_COUNTED = 10_000
"""The largest number that a node may count to while it prepares."""


def greeted(transition: Transition, stream: int, message: wire.NodeMessage, caller: str, seen: str = "") -> None:
    """Takes the first message of a stream: welcomes a hello, or refuses it by name."""
    try:
        _admit(transition, stream, message, caller, seen)
    except Refused as refused:
        transition.refuse(stream, shorten(message.hello.node, 64), refused.reason, str(refused))


def _admit(transition: Transition, stream: int, message: wire.NodeMessage, caller: str, seen: str) -> None:
    """Raises Refused."""
    hello, state, origin = message.hello, transition.state, _origin(seen)
    if message.WhichOneof("message") != "hello":
        raise Refused(wire.MALFORMED, "the first message is not Hello; update dtfm on the node")
    device, process = check_hello(hello), f"{hello.incarnation:016x}"
    candidates = check_candidates(hello, seen)
    if hello.node != caller:
        sentence = f"the key belongs to the name {caller!r}, and not to {hello.node!r}; join with --id {caller}"
        raise Refused(wire.NAME_TAKEN, sentence)
    if (refused := refusal_of(state.ledger, caller)) is not None:  # it may have been revoked since it made the call
        raise refused
    if state.ledger.outcome is not None:
        tell_end(transition, stream)
        return
    worked = state.ledger.trust.worked.get(hello.node)
    reason = "first contact" if worked is None else "it has taken part before" if worked else "it was here before"
    if (old := state.members.sessions.get(hello.node)) is not None:
        is_same = state.ledger.members[old.node].incarnation == process
        if not is_same and transition.now - _heard(state, old) <= SIGN_OF_LIFE_LEASES * state.lease:
            raise Refused(wire.IDENTITY_IN_USE, _in_use(state, old))
        newer = "a newer one" if is_same else "that of another process, as it was silent"
        transition.commands.append(HangUp(old.stream))
        leave(transition, old, f"its stream was replaced by {newer}")
        reason = "reconnected" if is_same else reason
    elif len(state.members.sessions) >= MAX_NODES:
        raise Refused(wire.FULL, f"this coordinator has {MAX_NODES} nodes, as many as it takes")
    if transition.state.ledger.outcome is not None:  # the replaced stream may have ended the run
        tell_end(transition, stream)
        return
    _check_crowd(transition.state, caller, origin)
    only = hello.relay == wire.Hello.ONLY
    session = Session(
        hello.node,
        stream,
        transition.now,
        admission=Admission.RELAY if only else Admission.JOINED,
        certified=transition.now,
        origin=origin,
        device=(device.kind, hello.device.bf16),
    )
    address = (*candidates, seen, "")[0]
    relays = "only" if only else "also" if hello.relay else ""
    version = shorten(hello.package_version)
    welcoming.welcome(
        transition, session, ev.NodeJoined(hello.node, reason, address, device, version, process, candidates, relays)
    )


def _origin(seen: str) -> str:
    """The place that a call comes from, for counting keys per address; empty: not known, or the coordinator's own machine."""
    with contextlib.suppress(ValueError):
        address = ip_address(seen)
        return "" if address.is_loopback else origin_of(address)
    return ""


def _check_crowd(state: State, node: str, origin: str) -> None:
    """Among strangers, limits the keys that may be members from one address: otherwise a person with many invitations could be
    many members. Raises Refused."""
    if not origin or not state.ledger.is_open:
        return
    most, key = state.run.trust.keys_per_address, state.ledger.key_of
    there = {key(s.node) or s.node for s in state.members.sessions.values() if s.origin == origin}
    if len(there - {key(node) or node}) >= most:
        raise Refused(
            wire.FULL,
            f"{most} keys from {origin} are members, as many as may come from one address ([trust] keys_per_address); come back "
            "when one has left",
        )


def beats(transition: Transition, session: Session, beat: wire.Heartbeat) -> None:
    work = session.work
    if beat.HasField("work") and (work is None or (work.done, work.waits) != (beat.work.done, beat.work.waits)):
        work = Work(beat.work.done, beat.work.waits, transition.now)
    session = replace(session, beat=beat, work=work)
    transition.set_session(session)
    _prepares(transition, session, beat)
    slow_lines.heard(transition, session, beat)


def _prepares(transition: Transition, session: Session, beat: wire.Heartbeat) -> None:
    """Takes a node's report of its preparations. The log gets each kind of work once, and each tenth of it, so that a node cannot
    fill the log."""
    if session.admission not in (Admission.JOINED, Admission.PROBING) or beat.preparing not in PREPARING:
        return
    tenths = min(beat.done, beat.of) * 10 // beat.of if beat.of else 0
    if session.prepared is not None or (beat.preparing, tenths) <= session.prepares:
        return
    transition.set_session(replace(session, prepares=(beat.preparing, tenths)))
    of = min(beat.of, MOST_COUNTED)
    transition.emit(ev.NodePrepares(session.node, PREPARING[beat.preparing], min(beat.done, of), of))


def prepared(transition: Transition, session: Session, message: wire.Prepared) -> None:
    """The node has read the run. It goes on if it agrees with the run's description, or makes it: see describing.py."""
    if session.admission is not Admission.JOINED or session.prepared is not None:
        transition.log(f"ignored a second Prepared of {session.node}")
        return
    state, known = transition.state, transition.state.run.train.precision
    if message.precision not in (plan_pb2.PRECISION_UNSPECIFIED, PRECISIONS.get(session.precision)):
        transition.log(f"ignored what {session.node} prepared in another precision than {session.precision}")
        return
    described = check_prepared(message, precision.prepared_for(state, session))
    check_pins(described, state.run.trust)
    if session.precision != known != "auto":
        if session.precision != precision.of_newcomer(state, session.device):
            welcoming.prepare_again(transition, session)
            return
        welcoming.compute_in(transition, session.precision, f"{session.node}, whose GPU has no bf16,", but=session.node)
        state = transition.state
    if describing.heard(transition, session, message, described):
        _go_on(transition, transition.state.members.sessions[session.node], message)


def ask_again(transition: Transition) -> None:
    """Nodes that wait with their description of the run go on, or are refused, if what decides that has changed."""
    if not describing.should_ask_again(transition):
        return
    for node in describing.waiting(transition.state):
        session = transition.state.members.sessions.get(node)
        if session is None or session.prepared is None:
            continue  # it has left for what another has said
        state, described = transition.state, transition.state.ledger.described
        if described is not None and session.precision != state.run.train.precision:
            welcoming.prepare_again(transition, session)
            continue
        try:
            mine = check_prepared(session.prepared, precision.prepared_for(state, session))
            if describing.heard(transition, session, session.prepared, mine):
                said, session = session.prepared, replace(session, prepared=None)
                transition.set_session(session)
                _go_on(transition, session, said)
        except Refused as refused:
            rejected(transition, session.stream, refused)


def _go_on(transition: Transition, session: Session, message: wire.Prepared) -> None:
    """The node agrees with the run, or has described it. It measures its links next."""
    ledger = transition.state.ledger
    second = describing.are_two_users(ledger, session.node, ledger.described_by)
    if message.data_read and second and not ledger.data_confirmed:
        transition.emit(ev.DataConfirmed(session.node))
    known = transition.state.ledger.members[session.node].device.flops
    if message.flops and (message.flops != known or message.timed_beside):
        transition.emit(ev.DeviceTimed(session.node, message.flops, beside=message.timed_beside))
    disks.claimed(transition, session, message)
    session = transition.state.members.sessions[session.node]
    if links.probe_from(transition, session):
        due = transition.now + PROBE_LEASES * transition.state.lease
        session = transition.state.members.sessions[session.node]  # now with the nodes whose reports are awaited
        transition.set_session(replace(session, admission=Admission.PROBING, probe_until=due))
    else:
        _arrive(transition, session)


def links_measured(transition: Transition, session: Session, report: wire.LinkReport) -> None:
    links.measured(transition, session, report)
    _arrive_if_known(transition, session.node)


def reached(transition: Transition, session: Session, report: wire.Reached) -> None:
    ways.reached(transition, session.node, report)
    for outcome in report.outcomes:
        _arrive_if_known(transition, outcome.node)


def closed(transition: Transition, stream: int, reason: str) -> None:
    """A stream has ended: the stream of a member, or of a stranger."""
    if session := transition.state.members.session_of(stream):
        leave(transition, session, reason)


def rejected(transition: Transition, stream: int, refused: Refused) -> None:
    """A message on this stream was refused. The stream ends, and so does the membership of its node, if it has one."""
    if (session := transition.state.members.session_of(stream)) is not None:
        send_home(transition, session, refused)
    else:
        transition.refuse(stream, "", refused.reason, str(refused))


def lapse(transition: Transition) -> None:
    """Ends leases that ran out, and waiting for late link reports. Lets in newcomers that have waited long enough for others."""
    _look_at_the_clock(transition)
    for session in sorted(transition.state.members.sessions.values(), key=lambda s: s.node):
        if transition.now - _heard(transition.state, session) > transition.state.lease:
            lapsed = wire.Lapsed(lease_seconds=transition.state.lease)
            transition.send([session.node], wire.CoordinatorMessage(lapsed=lapsed))
            transition.commands.append(HangUp(session.stream))
            leave(transition, session, f"no sign of life for {transition.state.lease:g} seconds", silent=True)
        elif session.admission is Admission.PROBING and transition.now > session.probe_until:
            transition.log(f"{session.node} did not report its links in time; they count as average")
            _arrive(transition, session)
        elif session.admission is Admission.PROBING:
            _arrive_if_known(transition, session.node)
    if transition.state.stopped:
        return
    _renew_certificates(transition)
    arrived = [s.arrived for s in transition.state.members.sessions.values() if s.admission is Admission.ARRIVED]
    lease = transition.state.lease
    if arrived and (
        transition.now - max(arrived) >= TOGETHER_LEASES * lease
        or transition.now - min(arrived) >= LONGEST_WAVE_LEASES * lease
    ):
        _let_in(transition)
    links.measure_slow(transition)


def _look_at_the_clock(transition: Transition) -> None:
    """If this process itself was paused (suspended, swapped out, busy), messages of nodes may be unread. So the silence of nodes
    is counted from now."""
    members = transition.state.members
    gap = transition.now - members.looked > SIGN_OF_LIFE_LEASES * transition.state.lease
    transition.set_members(replace(members, looked=transition.now, hearing=transition.now if gap else members.hearing))


def _renew_certificates(transition: Transition) -> None:
    for session in sorted(transition.state.members.sessions.values(), key=lambda s: s.node):
        if transition.now - session.certified > CERTIFICATE_LIFETIME.total_seconds() / 2:
            transition.set_session(replace(session, certified=transition.now))
            transition.commands.append(Certify(session.stream, session.node))


def _arrive_if_known(transition: Transition, node: str) -> None:
    """Plans may use the newcomer when its links are measured and all nodes that were asked have tried to dial it. Nodes that have
    left in between are not waited for."""
    session = transition.state.members.sessions.get(node)
    if session is None or session.admission is not Admission.PROBING:
        return
    if not session.probing | session.reaching:
        _arrive(transition, session)


def _arrive(transition: Transition, session: Session) -> None:
    """Plans may use the node: immediately if it is the last that the run waits for, otherwise together with others that arrive at
    about the same time."""
    ways.arrived(transition, session.node)
    transition.set_session(replace(session, admission=Admission.ARRIVED, arrived=transition.now))
    links.measure_relays(transition)
    state = transition.state
    here = sum(s.admission in (Admission.ARRIVED, Admission.READY) for s in state.members.sessions.values())
    if not state.planner.has_planned and here >= state.run.cluster.nodes:
        _let_in(transition)


def _let_in(transition: Transition) -> None:
    for session in sorted(transition.state.members.sessions.values(), key=lambda s: s.node):
        if session.admission is Admission.ARRIVED:
            transition.set_session(replace(session, admission=Admission.READY))
            transition.emit(ev.NodeReady(session.node))


def _heard(state: State, session: Session) -> float:
    """When the node last gave a sign of life, or this process began to listen, whichever is later."""
    return max(session.heard, state.members.hearing)


def _in_use(state: State, old: Session) -> str:
    candidates = state.ledger.members[old.node].candidates
    where = candidates[0] if candidates else "an unknown address"
    return (
        f"another process has the identity {old.node!r} and is alive (at {where}); give this one its own with --id, or end the "
        f"other, and if that died without a word, start this one again in {SIGN_OF_LIFE_LEASES * state.lease:g} s"
    )
