"""What an operator asks of the whole run: a pause, to go on, or to stop so that a later process goes on.

Who pauses or stops the run is in the ledger (``hold``), so a restart does the same. The commit of the step in hand then ends in a
pause (step/pause.py).
"""

from __future__ import annotations

from dtfm.coordinator.core.ending import put_down
from dtfm.coordinator.core.members.invitations import check_operator
from dtfm.coordinator.core.phases import Gathering, Switching
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.core.transition import AnswerAccess, SteerAsked, Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def steer(transition: Transition, asked: SteerAsked) -> None:
    """An operator pauses the run, goes on with it, or stops it."""
    hold, over = transition.state.ledger.hold, transition.state.stopped
    try:
        check_operator(transition.state.ledger, asked.by)
        if over:
            raise Refused(wire.RUN_OVER, "the run is over, or has stopped already")
        if asked.wish not in wire.SteerRequest.Wish.values():
            raise Refused(wire.MALFORMED, f"wish {asked.wish} is none of this version of dtfm")
    except Refused as refused:
        transition.commands.append(AnswerAccess(asked.ticket, refused))
        return
    match asked.wish:
        case wire.SteerRequest.CONTINUE:
            sentence = "the run is not paused" if hold is None else "the run goes on"
            if hold is not None:
                transition.emit(ev.RunContinued(asked.by))
        case wire.SteerRequest.STOP_NOW:
            sentence = "the run stops now"
            put_down(transition, asked.by)
        case wish:
            wanted = ev.RunPaused(asked.by, ends=wish == wire.SteerRequest.STOP)
            if hold is None or hold.ends != wanted.ends:
                transition.emit(wanted)
            sentence = (hold if hold is not None and hold.ends == wanted.ends else wanted).narrate()
    transition.commands.append(AnswerAccess(asked.ticket, wire.SteerReply(sentence=sentence)))


def stop_when_safe(transition: Transition) -> None:
    """The rule: a run that is to stop, and in which no step is in hand, does so once the state of its last step is safe, or
    nobody is here who has it."""
    state, phase, hold = transition.state, transition.state.phase, transition.state.ledger.hold
    if state.stopped or hold is None or not hold.ends or not isinstance(phase, Gathering | Switching):
        return
    step = state.ledger.training.step
    gone = isinstance(phase, Gathering) and transition.now >= phase.since + GRACE_LEASES * state.lease
    if step == 0 or state.ledger.copies.is_safe(step) or (gone and not state.members.sessions):
        put_down(transition, hold.by)
