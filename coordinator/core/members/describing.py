"""Who says what the run's data and model are.

The run file's pins come first. Otherwise the first node that describes the run is believed, or, among strangers, the first two
that agree. Until the first plan that is not the last word on the data: the coordinator's own copies of the files count more than
any member, and several parties that have read the same count more than fewer that have read something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dtfm.coordinator.core.members import welcoming
from dtfm.coordinator.core.members.leaving import send_home
from dtfm.coordinator.core.plan import precision
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.coordinator.core.validation.description import (
    check_agrees,
    check_prepared,
    data_differs,
    own_copy_differs,
    same_data,
)
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.protos.source_files import Files


def heard(transition: Transition, session: Session, message: wire.Prepared, described: ev.Described) -> bool:
    """Takes a node's description of the run, and describes the run by it if it is time. Returns whether the node agrees with the
    run. If not, the node waits. Raises Refused if it would train something else."""
    _check_own_copy(transition.state, described)
    if message.data_read:
        _remember(transition, session.node, described.data_digest)
    run = transition.state.ledger.described
    if run is not None and same_data(described, run):
        check_agrees(described, run)
        return True
    if run is None:
        if _is_believed(transition.state):
            welcoming.describe(transition, session, described)
            return True
        return _second_opinion(transition, session, message, described)
    if not _is_open_question(transition.state):
        raise data_differs(described, run)
    mine, theirs = len(_parties(transition.state, described.data_digest)), _weight(transition.state, run)
    if mine > theirs:
        reason = f"{mine} parties have read other data, and {theirs} the same"
        _describe_anew(transition, session, described, reason)
        return True
    if not any(_may_speak(transition.state)):
        raise data_differs(described, run)
    _have_wait(transition, session, message)
    return False


def own_files_read(transition: Transition, files: Files) -> None:
    """Takes the coordinator's own copies. Until the first plan they overrule what members have read."""
    transition.state = replace(transition.state, own_files=files)
    ledger = transition.state.ledger
    if ledger.described is None or not _is_open_question(transition.state):
        return
    if (refused := own_copy_differs(ledger.described, files)) is not None:
        transition.emit(ev.DescriptionDropped(ledger.described_by, "the coordinator's own files differ from its"))
        _send_home_all(transition, refused)


def waiting(state: State) -> list[str]:
    """In order, the nodes that have described the run and wait: for a second opinion, or for a third one."""
    return sorted(node for node, session in state.members.sessions.items() if session.prepared is not None)


def should_ask_again(transition: Transition) -> bool:
    """Whether nodes wait whose answer may be another one now. After the first step none waits; until then another precision may
    have all of them prepare again."""
    state, before = transition.state, transition.before
    if before.ledger.training.step or not any(s.prepared is not None for s in state.members.sessions.values()):
        return False
    return state.ledger.described is not before.ledger.described or (
        state.ledger.described is not None and not (_is_open_question(state) and any(_may_speak(state)))
    )


def are_two_users(ledger: Ledger, one: str, other: str) -> bool:
    """Whether the two names are known to belong to two keys, so that they are two opinions. The key of a revoked name is no
    longer known."""
    first, second = ledger.access.names.get(one), ledger.access.names.get(other)
    return first is not None and second is not None and first.key != second.key


def _remember(transition: Transition, node: str, digest: str) -> None:
    members = transition.state.members
    if not _is_open_question(transition.state) or members.read.get(node) == digest:
        return
    others = [(other, its) for other, its in members.read.items() if other != node]
    transition.set_members(replace(members, read=dict([*others, (node, digest)][-MAX_NODES:])))


def _is_open_question(state: State) -> bool:
    """Whether members may still change what the data are: before the first plan, unless the run file pins the data."""
    return not state.ledger.training.generation and not state.run.trust.data


def _is_believed(state: State) -> bool:
    """Whether the first node that describes the run is believed."""
    trust = state.run.trust
    return trust.mode == "trusted" or bool(trust.data and trust.workload)


def _check_own_copy(state: State, described: ev.Described) -> None:
    """Raises Refused for a node whose files are not the coordinator's, unless the run's members have the same data."""
    run = state.ledger.described
    if not _is_open_question(state) or (run is not None and same_data(described, run)):
        return
    if (refused := own_copy_differs(described, state.own_files)) is not None:
        raise refused


def _parties(state: State, data_digest: str) -> frozenset[str]:
    """The parties that have read these data themselves, and are not quarantined."""
    ledger = state.ledger
    readers = (node for node, digest in state.members.read.items() if digest == data_digest)
    return frozenset(ledger.party(node) for node in readers if ledger.quarantine_of(node) is None)


def _weight(state: State, run: ev.Described) -> int:
    """The number of parties that have read the run's data, also before this process started."""
    return max(len(_parties(state, run.data_digest)), 1 + state.ledger.data_confirmed)


def _may_speak(state: State) -> Iterator[Session]:
    """The members that may still describe the run, for parties that have not said what they have read."""
    heard = {state.ledger.party(node) for node in state.members.read}
    for session in state.members.sessions.values():
        prepares = session.admission is Admission.JOINED and session.prepared is None
        if prepares and state.ledger.party(session.node) not in heard:
            yield session


def _second_opinion(transition: Transition, session: Session, message: wire.Prepared, described: ev.Described) -> bool:
    """Describes the run by two members with different keys that would train the same. Returns whether this is the second."""
    _have_wait(transition, session, message)
    sessions = transition.state.members.sessions
    others = (sessions[node] for node in waiting(transition.state))
    second = next((other for other in others if _agree(transition.state, other, session, described)), None)
    if second is None:
        return False
    welcoming.describe(transition, second, described)
    transition.emit(ev.DataConfirmed(session.node))
    return False  # those who wait are asked again, this one among them


def _agree(state: State, one: Session, other: Session, described: ev.Described) -> bool:
    """Whether two members with different keys would train the same. ``described``: what the ``other`` would train."""
    if one.prepared is None or not are_two_users(state.ledger, one.node, other.node):
        return False
    try:
        check_agrees(check_prepared(one.prepared, precision.prepared_for(state, one)), described)
    except Refused:
        return False
    return True


def _have_wait(transition: Transition, session: Session, message: wire.Prepared) -> None:
    if session.prepared is None:
        transition.set_session(replace(session, prepared=message, prepares=(0, -1)))
        transition.emit(ev.NodePrepares(session.node, "waits for a second opinion"))


def _describe_anew(transition: Transition, session: Session, described: ev.Described, reason: str) -> None:
    """Takes the node's description in place of the run's. Members that agreed with the former one are sent home."""
    ledger = transition.state.ledger
    transition.emit(ev.DescriptionDropped(ledger.described_by, reason))
    _send_home_all(transition, data_differs(ledger.description, described))
    welcoming.describe(transition, session, described)


def _send_home_all(transition: Transition, refused: Refused) -> None:
    """Refuses all members that have agreed with the run's description."""
    for each in sorted(transition.state.members.sessions.values(), key=lambda s: s.node):
        if each.admission in (Admission.PROBING, Admission.ARRIVED, Admission.READY):
            send_home(transition, each, refused)
