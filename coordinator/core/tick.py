"""The coordinator's core: ``tick(state, input, now) -> state, commands``. Pure; the shell is server.py."""

from __future__ import annotations

from collections.abc import Sequence

from dtfm.coordinator.core import drift, leaving, membership, post_commit, replanning, snapshot, standby, steps
from dtfm.coordinator.core.ending import stop
from dtfm.coordinator.core.state import Gathering, Pausing, Session, State, Stepping, Switching
from dtfm.coordinator.core.transition import (
    Command,
    Greeted,
    HangUp,
    Heard,
    Input,
    ManifestDone,
    Planned,
    PlanNow,
    StopAsked,
    StreamClosed,
    TimePassed,
    Turn,
)
from dtfm.coordinator.core.validation import Refused, shorten


def tick(state: State, event: Input, now: float) -> tuple[State, Sequence[Command]]:
    """What becomes of ``state`` when ``event`` happens at ``now`` (seconds of a clock that never goes back), and what is
    to be done, in this order."""
    turn = Turn(state, now)
    over = state.stopped
    match event:
        case Greeted() if over and state.ledger.outcome is None:
            turn.commands.append(HangUp(event.stream))  # it is to come back to the next process
        case Greeted():
            membership.greeted(turn, event.stream, event.message, event.shows_token)
        case Heard():
            _heard(turn, event, over)
        case StreamClosed():
            membership.closed(turn, event.stream, event.reason)
        case StopAsked():
            stop(turn, event.reason, event.dismiss)
        case PlanNow() if over:
            replanning.answer(turn, (event.ticket,), False, "the run is over")
        case PlanNow():
            replanning.consider(turn, event.ticket)
        case Planned() if not over:
            replanning.planned(turn, event)
        case ManifestDone() if not over:
            post_commit.manifest_done(turn, event.step, event.problem)
        case TimePassed() if not over:
            _time_passed(turn)
        case Planned() | ManifestDone() | TimePassed():
            pass
    steps.conclude(turn)
    snapshot.make_way(turn)
    leaving.let_go(turn)
    return turn.state, turn.commands


def _heard(turn: Turn, event: Heard, over: bool) -> None:
    session = turn.state.session_of(event.stream)
    if session is None:
        return  # its node has left; the stream is being hung up
    turn.update(session, heard=turn.now)
    session = turn.state.sessions[session.node]
    try:
        if event.message.WhichOneof("message") == "goodbye":
            turn.commands.append(HangUp(session.stream))
            membership.leave(turn, session, f"goodbye: {shorten(event.message.goodbye.reason)}", for_good=True)
        elif not over:
            _dispatch(turn, session, event)
    except Refused as refused:
        turn.refuse(session.stream, session.node, refused.reason, str(refused))
        membership.leave(turn, session, f"refused: {refused}")


def _dispatch(turn: Turn, session: Session, event: Heard) -> None:
    message, node = event.message, session.node
    kind = message.WhichOneof("message")
    if kind in _OF_THE_READY and node not in turn.state.ready:
        turn.log(f"ignored {kind} of {node}, which is not ready yet")
        return
    match kind:
        case "prepared":
            membership.prepared(turn, session, message.prepared)
        case "links":
            membership.links_measured(turn, session, message.links)
        case "plan_ready":
            steps.plan_ready(turn, node, message.plan_ready)
        case "plan_failed":
            failed = message.plan_failed
            replanning.plan_failed(turn, node, failed.generation, failed.problem, failed.backup, failed.lost)
        case "step_ready":
            steps.step_ready(turn, node, message.step_ready)
        case "step_failed":
            steps.step_failed(turn, node, message.step_failed)
        case "evaluated":
            post_commit.evaluated(turn, node, message.evaluated)
        case "bucket_written":
            post_commit.bucket_written(turn, node, message.bucket_written)
        case "applied":
            post_commit.applied(turn, node, message.applied)
        case "prefetched":
            standby.prefetched(turn, session, message.prefetched)
            if isinstance(turn.state.phase, Gathering):
                replanning.consider(turn)  # it may have what nobody else has any more
        case "kept":
            snapshot.kept(turn, session, message.kept)
        case "leaving":
            leaving.wishes_to_leave(turn, session, message.leaving)
        case "codecs_chosen":
            drift.codecs_chosen(turn, node, message.codecs_chosen)
        case "heartbeat":
            drift.measured(turn, node, message.heartbeat.flops)
        case _:
            turn.log(f"ignored a message of {node} that means nothing here: {kind}")


def _time_passed(turn: Turn) -> None:
    membership.lapse(turn)
    if turn.state.stopped:
        return
    match turn.state.phase:
        case Gathering():
            replanning.consider(turn)
        case Stepping(deadline=deadline) if turn.now <= deadline:
            replanning.consider(turn)
        case Switching(awaiting, deadline) if turn.now > deadline:
            node = min(awaiting)
            problem = f"not ready within {turn.state.patience:g} seconds"
            replanning.plan_failed(turn, node, turn.state.ledger.generation, problem)
        case Stepping():
            steps.overdue(turn)
        case Pausing(deadline) if turn.now > deadline:
            post_commit.overdue(turn)


_OF_THE_READY = frozenset(
    (
        "plan_ready",
        "plan_failed",
        "step_ready",
        "step_failed",
        "evaluated",
        "bucket_written",
        "applied",
        "codecs_chosen",
        "kept",
    )
)
