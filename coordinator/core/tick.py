"""The coordinator's core: ``tick(state, input, now) -> state, ready``. Pure; the shell is service/server.py.

A tick first takes the input in, then applies its rules until none of them changes anything. So a part of the core that changes
the state need not know what follows elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dtfm.coordinator.core import act, steering, transition as t
from dtfm.coordinator.core.copies import checkpoints, snapshot, standby
from dtfm.coordinator.core.ending import stop
from dtfm.coordinator.core.health import broken_pairs, failing_nodes
from dtfm.coordinator.core.members import describing, invitations, leaving, membership, quarantine, timing
from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.plan import adoption, drift, replanning, slow_lines
from dtfm.coordinator.core.refusal import Refused, shorten
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step import beginning, commits, evaluation, hung, pause, telling, texts, votes
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust import auditing
from dtfm.coordinator.core.validation.beats import checked
from dtfm.protos import control_pb2 as wire

MOST_PASSES = 1000
"""If rules still change the state after they have been applied this many times, they undo each other: a bug."""


def tick(state: State, event: t.Input, now: float) -> tuple[State, t.Ready]:
    """The state after ``event`` at ``now`` (seconds of a clock that never goes back), and what is to be done."""
    transition = Transition(state, now)
    _take_in(transition, event)
    act.carry_out(transition)
    _apply_rules(transition, event)
    quarantine.tell_peers(transition)
    auditing.tell_standings(transition)
    telling.tell_changes(transition)
    telling.tell_idle(transition)
    return transition.state, t.Ready(tuple(transition.entries), tuple(transition.commands))


def _take_in(transition: Transition, event: t.Input) -> None:
    over = transition.state.stopped
    match event:
        case t.Greeted() if over and transition.state.ledger.outcome is None:
            transition.commands.append(t.HangUp(event.stream))  # the node should reconnect to the next process
        case t.Greeted():
            membership.greeted(transition, event.stream, event.message, event.caller, event.seen)
        case t.Heard():
            _heard(transition, event, over)
        case t.StreamClosed():
            membership.closed(transition, event.stream, event.reason)
        case t.Rejected():
            membership.rejected(transition, event.stream, Refused(wire.MALFORMED, event.sentence))
        case t.StopAsked():
            stop(transition, event.reason)
        case t.Asked(ticket, wire.PlanNowRequest()) if not over:
            replanning.replan(transition, (ticket,))
        case t.Asked():
            transition.commands.append(t.Answer(event.ticket, _reply(transition, event)))
        case t.Planned() if not over:
            replanning.planned(transition, event)
        case t.ManifestDone() if not over:
            checkpoints.manifest_done(transition, event)
        case t.OwnFilesRead() if not over:
            describing.own_files_read(transition, event.files)
        case t.TimePassed() if not over:
            membership.lapse(transition)
            _overdue(transition)
        case t.Planned() | t.ManifestDone() | t.OwnFilesRead() | t.TimePassed():
            pass


def _reply(transition: Transition, asked: t.Asked) -> t.Granted | Refused:
    """The answer to a request. Refusals are not logged: otherwise strangers could fill the log."""
    request, by, at = asked.request, asked.by, asked.at
    try:
        if isinstance(request, wire.EnrolRequest):
            return invitations.enrol(transition, request, at)
        invitations.check_operator(transition.state.ledger, by, at)
        match request:
            case wire.InviteRequest():
                return invitations.invite(transition, request, by, at, asked.invitation)
            case wire.RevokeRequest():
                sentence = invitations.revoke(transition, request.what, by, at)
            case wire.ExpelRequest():
                sentence = quarantine.expel(transition, request, by)
            case wire.ForgiveRequest():
                sentence = quarantine.forgive(transition, request.node, by)
            case wire.SteerRequest():
                return steering.steer(transition, request, by)
            case wire.PlanNowRequest():
                generation = transition.state.ledger.training.generation
                return wire.PlanNowReply(generation=generation, reason="the run is over")
        return wire.Done(sentence=sentence)
    except Refused as refused:
        return refused


def _apply_rules(transition: Transition, event: t.Input) -> None:
    # Replanning and standbys depend on the ledger, the planner and the phase, and `decide` also on time and standbys' reports.
    progress = isinstance(event, t.Heard) and event.message.WhichOneof("message") == "standby_progress"
    waits = isinstance(event, t.TimePassed) or (progress and isinstance(transition.state.phase, Gathering))
    seen = None if waits else transition.before
    for _ in range(MOST_PASSES):
        before = transition.state
        _apply(transition, _FIRST)
        if not transition.state.stopped and (seen is None or _plan_may_change(seen, transition.state)):
            seen = transition.state
            _apply(transition, _OF_PLANS)
        _apply(transition, _LAST)
        if transition.state is before:
            return
    raise AssertionError(f"the rules of a tick chase each other: {transition.state.phase}")


def _apply(transition: Transition, rules: Iterable[Callable[[Transition], None]]) -> None:
    for rule in rules:
        rule(transition)
        act.carry_out(transition)


_FIRST = (
    quarantine.part_with_excluded,
    membership.ask_again,
    auditing.conclude,
    commits.commit_if_due,
    pause.end_pause,
    steering.stop_when_safe,
)
_OF_PLANS = (replanning.replan, slow_lines.leave_slow_line, act.separate_or_quarantine, standby.arrange)
_LAST = (
    snapshot.go_on,
    checkpoints.go_on,
    standby.end_overdue,
    leaving.let_go,
    broken_pairs.measure_broken,
    failing_nodes.test,
)
"""The rules, in their order. Those of plans depend on the ledger, the planner and the phase."""


def _plan_may_change(before: State, state: State) -> bool:
    changed = state.ledger is not before.ledger or state.planner is not before.planner
    return changed or type(state.phase) is not type(before.phase)


def _heard(transition: Transition, event: t.Heard, over: bool) -> None:
    session = transition.state.members.session_of(event.stream)
    if session is None:
        return  # the node has left; its stream is being hung up
    transition.set_session(replace(session, heard=transition.now))
    session = transition.state.members.sessions[session.node]
    try:
        if event.message.WhichOneof("message") == "goodbye":
            transition.commands.append(t.HangUp(session.stream))
            leaving.leave(transition, session, f"goodbye: {shorten(event.message.goodbye.reason)}", for_good=True)
        elif not over:
            _dispatch(transition, session, event)
    except Refused as refused:
        membership.rejected(transition, session.stream, refused)


def _dispatch(transition: Transition, session: Session, event: t.Heard) -> None:
    message, node = event.message, session.node
    kind = message.WhichOneof("message")
    if kind not in _BEFORE_IT_IS_READY and not transition.state.ledger.members[node].ready:
        transition.log(f"ignored {kind} of {node}, which is not ready yet")
        return
    match kind:
        case "prepared":
            membership.prepared(transition, session, message.prepared)
        case "links":
            membership.links_measured(transition, session, message.links)
        case "reached":
            membership.reached(transition, session, message.reached)
        case "plan_ready":
            beginning.plan_ready(transition, node, message.plan_ready)
        case "plan_failed":
            adoption.plan_failed(transition, node, message.plan_failed)
        case "step_ready":
            votes.step_ready(transition, node, message.step_ready)
        case "audited":
            auditing.heard(transition, node, message.audited)
        case "step_failed":
            votes.step_failed(transition, node, message.step_failed)
        case "evaluated":
            evaluation.reported(transition, node, message.evaluated)
        case "texts":
            texts.heard(transition, node, message.texts)
        case "moved":
            room = checkpoints if message.moved.in_checkpoint else snapshot
            room.moved(transition, session, message.moved)
        case "applied":
            pause.applied(transition, node, message.applied)
        case "standby_progress":
            standby.reported(transition, session, message.standby_progress)
        case "leaving":
            leaving.wants_to_leave(transition, session, message.leaving)
        case "timed":
            timing.timed_again(transition, session, message.timed)
        case "codecs_chosen":
            drift.codecs_chosen(transition, node, message.codecs_chosen)
        case "heartbeat":  # a sign of life, as every message is
            membership.beats(transition, session, checked(message.heartbeat))
        case _:
            transition.log(f"ignored a message of {node} that means nothing here: {kind}")


def _overdue(transition: Transition) -> None:
    """Ends a phase when a node hangs in it, or when its deadline has passed."""
    phase = transition.state.phase
    if transition.state.stopped or isinstance(phase, Gathering) or hung.leave_out_hung(transition):
        return
    if transition.now <= phase.deadline:
        return
    match phase:
        case Switching():
            adoption.plan_overdue(transition, phase)
        case Stepping():
            votes.step_overdue(transition, phase)
        case Pausing():
            pause.pause_overdue(transition, phase)


_BEFORE_IT_IS_READY = frozenset({"prepared", "links", "reached", "standby_progress", "leaving", "heartbeat"})
"""The messages that count from a node that is not ready. It may have taken part in the plan as another process."""
