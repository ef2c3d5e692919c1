"""Nodes that leave: lost suddenly, or in order, after handing over their work and state."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.copies import checkpoints
from dtfm.coordinator.core.copies.availability import is_under_way
from dtfm.coordinator.core.copies.lost_state import awaited
from dtfm.coordinator.core.findings import Gone
from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping
from dtfm.coordinator.core.plan.replanning import drop_stale_choice
from dtfm.coordinator.core.reach import ways
from dtfm.coordinator.core.refusal import Refused, shorten
from dtfm.coordinator.core.state.members import Away
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.step import pause
from dtfm.coordinator.core.transition import HangUp, Transition
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def leave(
    transition: Transition, session: Session, reason: str, *, for_good: bool = False, silent: bool = False
) -> None:
    """Removes the node. Training goes on without it. ``for_good``: its process has ended, and the state in its memory is lost.
    ``silent``: its lease has ended."""
    node, plan, before = session.node, transition.state.ledger.training.plan, transition.state.ledger.reach.ways
    members = transition.state.members
    others = tuple(other for other in members.ended if other != node)
    ended = (*others, node)[-MAX_NODES:] if for_good else others
    away = {other: each for other, each in members.away.items() if other != node}
    if not for_good:
        away = dict([*away.items(), (node, Away(session.heard, silent))][-MAX_NODES:])
    transition.set_members(replace(members.without_session(node), ended=ended, away=away))
    if node in transition.state.ledger.members:  # otherwise all nodes left when the run was stopped
        transition.emit(ev.NodeLeft(node, reason))
    drop_stale_choice(transition)
    if transition.state.stopped:
        return
    ways.left(transition, node, before)
    if plan is not None and node in plan.nodes:
        transition.find(Gone(node, reason))


def send_home(transition: Transition, session: Session, refused: Refused) -> None:
    """Refuses the member. Its stream and its membership end."""
    transition.refuse(session.stream, session.node, refused.reason, str(refused))
    leave(transition, session, f"refused: {refused}")


def part_with(transition: Transition, session: Session, last_word: wire.CoordinatorMessage, reason: str) -> None:
    """Sends the node home, for good."""
    transition.send([session.node], last_word)
    transition.commands.append(HangUp(session.stream))
    leave(transition, session, reason, for_good=True)


def wants_to_leave(transition: Transition, session: Session, leaving: wire.Leaving) -> None:
    """Plans leave the node out from now on. The node keeps working until such a plan has begun, see `let_go`."""
    if transition.state.ledger.members[session.node].leaving:
        return
    transition.emit(ev.NodeLeaving(session.node, shorten(leaving.reason) or "it did not say why"))
    drop_stale_choice(transition)


def let_go(transition: Transition) -> None:
    """Sends home the nodes that want to leave and are no longer needed."""
    members = transition.state.ledger.members
    for node in transition.state.ledger.leaving:
        session = transition.state.members.sessions.get(node)
        if session is None or transition.state.stopped or _is_needed(transition, session):
            continue
        finish = wire.Finish(completed=True, reason="Left in order; the run goes on without this node.")
        part_with(transition, session, wire.CoordinatorMessage(finish=finish), f"in order: {members[node].leaving}")


def _is_needed(transition: Transition, session: Session) -> bool:
    """Whether the others would lose something if this node went now."""
    state, node, step = transition.state, session.node, transition.state.ledger.training.step
    if session.admission is not Admission.READY:
        return False
    if checkpoints.is_needed(state, node):
        return True
    match state.phase:
        case Gathering(waiting=waiting) as phase:  # a plan may still fetch state from it
            waits = None if waiting is None else awaited(state, phase, transition.now)
            return state.planner.asked is not None or (waits is not None and not waits.asks)
        case Stepping():
            return state.ledger.training.plan is not None and node in state.ledger.training.plan.nodes
        case Pausing() as phase if state.is_closing:
            return bool(phase.awaiting) or state.safekeeping.snapshot is not None or not is_under_way(state, step)
        case Pausing() as phase:
            return not phase.for_leaver or bool(pause.awaits(state, phase))
        case _:
            return True
