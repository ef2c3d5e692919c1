"""Nodes that leave in order: what they do and hold is handed over first, so that it costs the others nothing."""

from __future__ import annotations

from dtfm.coordinator.core import membership, post_commit
from dtfm.coordinator.core.replanning import consider
from dtfm.coordinator.core.returning import worth_waiting
from dtfm.coordinator.core.state import Gathering, Pausing, Session, Standing, Stepping
from dtfm.coordinator.core.transition import HangUp, Turn
from dtfm.coordinator.core.validation import shorten
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def wishes_to_leave(turn: Turn, session: Session, leaving: wire.Leaving) -> None:
    """From now on plans are made without the node; it works on until one has started, see `let_go`."""
    if session.leaving:
        return
    reason = shorten(leaving.reason) or "it did not say why"
    turn.emit(ev.NodeLeaving(session.node, reason))
    chosen = turn.state.chosen
    turn.update(session, leaving=reason)
    if chosen is not None and session.node in chosen.plan.nodes:
        turn.set(chosen=None, considered=frozenset())
    consider(turn)


def let_go(turn: Turn) -> None:
    """Whoever wants to go and is not needed any more is set free."""
    for node in sorted(node for node, session in turn.state.sessions.items() if session.leaving):
        session = turn.state.sessions.get(node)
        if session is None or turn.state.stopped or _needed(turn, session):
            continue
        reason = f"in order: {session.leaving}"
        turn.send(
            [node], finish=wire.Finish(completed=True, reason="Left in order; the run goes on without this node.")
        )
        turn.commands.append(HangUp(session.stream))
        membership.leave(turn, session, reason, for_good=True)


def _needed(turn: Turn, session: Session) -> bool:
    """Whether the others would lose something if this node went now."""
    state, node = turn.state, session.node
    if session.standing is not Standing.READY:
        return False
    if any(node in tally.writers for tally in state.checkpoints.values()):
        return True
    match state.phase:
        case Gathering(waiting=waiting) as phase:  # a plan may still fetch state from it
            return state.planning is not None or (
                waiting is not None and worth_waiting(state, phase, turn.now) is not None
            )
        case Stepping():
            return state.ledger.plan is not None and node in state.ledger.plan.nodes
        case Pausing():
            return not (state.saving and state.chosen is None) or bool(post_commit.missing(turn))
        case _:
            return True
