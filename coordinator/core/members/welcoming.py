"""Letting nodes in: the first message to a node. If the run changes before its first step, nodes prepare it again."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.members.leaving import leave
from dtfm.coordinator.core.plan import precision
from dtfm.coordinator.core.reach import ways
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.step import telling
from dtfm.coordinator.core.transition import Certify, Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def welcome(transition: Transition, session: Session, joined: ev.NodeJoined) -> None:
    """Lets in the node of this session."""
    session = replace(session, precision=precision.of_newcomer(transition.state, session.device))
    transition.emit(joined)
    transition.set_session(session)
    members = transition.state.members
    if (away := members.away.get(session.node)) is not None:
        transition.set_members(
            replace(members, away={**members.away, session.node: replace(away, back=transition.now)})
        )
    if joined.relay:
        ways.relay_came(transition)
    state = transition.state
    message = wire.Welcome(
        run=precision.prepared_for(state, session).message(state.ledger.run_id),
        revoked=sorted(transition.state.ledger.access.revoked),
        quarantined=transition.state.ledger.quarantined_names,
        status=telling.status(transition.state),
        worked_steps=transition.state.ledger.trust.worked[session.node],
        wait_for_coordinator_seconds=state.run.cluster.wait_for_coordinator,
        trained_samples=state.ledger.training.batches(state.ledger.training.step) * state.run.train.global_batch,
    )
    if (described := state.ledger.described) is not None and state.ledger.data_confirmed:
        message.data_fingerprint = bytes.fromhex(described.data_fingerprint)
        message.unigram_entropy = described.unigram_entropy
    transition.commands.append(Certify(session.stream, session.node, message))


def compute_in(transition: Transition, wanted: str, by: str, but: str = "") -> None:
    """Changes the precision of a run that has not trained yet. ``by``: the cause. All members prepare the run again except
    ``but``, which has prepared it in that precision."""
    ledger, run = transition.state.ledger, precision.in_precision(transition.state.run, wanted)
    transition.emit(ev.RunChanged(by, "train.precision", wanted, transition.state.run.train.precision))
    transition.set_run(run)
    if ledger.described is not None:
        transition.emit(ev.DescriptionDropped(ledger.described_by))
    for session in sorted(transition.state.members.sessions.values(), key=lambda s: s.node):
        if session.node != but and session.admission is not Admission.RELAY:
            prepare_again(transition, session)


def prepare_again(transition: Transition, session: Session) -> None:
    """Lets the node in again, on the same stream, so that it prepares the changed run."""
    node, member, wanted = (
        session.node,
        transition.state.ledger.members[session.node],
        transition.state.run.train.precision,
    )
    if session.precision == wanted and session.admission is Admission.JOINED and session.prepared is None:
        return  # the node is about to prepare the run
    leave(transition, session, f"it prepares the run again, in {wanted}")
    fresh = Session(
        node, session.stream, session.heard, certified=session.certified, origin=session.origin, device=session.device
    )
    again = f"it prepares the run in {wanted}"
    joined = ev.NodeJoined(
        node, again, member.address, member.device, "", member.incarnation, member.candidates, member.relay
    )
    welcome(transition, fresh, joined)


def describe(transition: Transition, session: Session, described: ev.Described) -> None:
    """Takes the node's description of the run, and its precision if that is still open."""
    if transition.state.run.train.precision == "auto":
        device = transition.state.ledger.members[session.node].device.name
        by = f"{session.node}, the first node that has read the run ({device}),"
        transition.emit(ev.RunChanged(by, "train.precision", session.precision, "auto"))
        transition.set_run(precision.in_precision(transition.state.run, session.precision))
    transition.emit(ev.RunDescribed(described, session.node))
