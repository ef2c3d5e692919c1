"""An operator's wishes for the whole run: pause, continue, or stop so that a later process goes on; set a key of the run file;
get the weights now; go back to an earlier step.

The ledger has who pauses or stops the run (``hold``), so a restart does the same. The commit of the current step then begins a
pause (step/pause.py).
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.config.changes import OF_THE_OPTIMIZER, value_of, with_change
from dtfm.coordinator.core.copies import checkpoints
from dtfm.coordinator.core.ending import put_down
from dtfm.coordinator.core.phases import Gathering, Switching
from dtfm.coordinator.core.plan import rollback
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.run_file.run_file import RunFile


def steer(transition: Transition, request: wire.SteerRequest, by: str) -> wire.Done:
    """Carries out an operator's wish. Raises Refused."""
    state, sets = transition.state, request.wish == wire.SteerRequest.SET
    if request.wish not in wire.SteerRequest.Wish.values():
        raise Refused(wire.MALFORMED, f"wish {request.wish} is none of this version of dtfm")
    if sets and state.stopped and not state.is_complete:
        raise Refused(wire.RUN_OVER, _end(state))
    if request.wish == wire.SteerRequest.SAVE:
        return _save(transition)
    if sets:
        return wire.Done(sentence=_set(transition, request, by))
    if request.wish == wire.SteerRequest.ROLLBACK:
        return _roll_back(transition, request, by)
    return wire.Done(sentence=_end(state) if state.stopped else _steer(transition, request.wish, by))


def changed_run(state: State, request: wire.SteerRequest) -> RunFile:
    """The run with the value that the request sets. Raises Refused."""
    try:
        run = with_change(state.run, request.key, request.value, _done(state))
    except ValueError as problem:
        raise Refused(wire.MALFORMED, str(problem)) from None
    if state.stopped and run.train.steps <= _done(state):
        raise Refused(wire.RUN_OVER, "the run is over; set train.steps to more than it has, and it goes on")
    return run


def _end(state: State) -> str:
    outcome, step = state.ledger.outcome, state.ledger.training.step
    return f"the run is over: {outcome.reason}" if outcome is not None else f"the run has stopped after step {step}"


def _save(transition: Transition) -> wire.Done:
    """Has the newest available weights sent to a checkpoint."""
    state, step = transition.state, transition.state.ledger.training.step
    kept, newest = state.safekeeping, state.ledger.copies.checkpoint_step
    paused = state.ledger.hold is not None and isinstance(state.phase, Gathering)
    newest = max(newest, kept.upload.step if kept.upload is not None else 0)
    coming = kept.snapshot is not None and kept.snapshot.checkpoint and kept.snapshot.step == step
    if state.stopped and not newest:
        raise Refused(wire.RUN_OVER, f"{_end(state)}, and there is no checkpoint of it")
    if newest and (state.stopped or paused):
        return wire.Done(sentence=f"no step is in hand; the newest weights are those of step {newest}", step=newest)
    if coming or state.is_closing or newest == step > 0:
        return wire.Done(sentence=f"the weights of step {step} are here, or on the way", step=step)
    transition.set_safekeeping(replace(kept, checkpoint_due=True))
    return wire.Done(sentence=f"the weights of step {step + 1} come here once it is committed", step=step + 1)


def _roll_back(transition: Transition, request: wire.SteerRequest, by: str) -> wire.Done:
    """Takes training back to an earlier step, or only says what that would mean."""
    state = transition.state
    if state.stopped:
        hint = "; set train.steps to more first, and it goes on" if state.is_complete else ""
        raise Refused(wire.RUN_OVER, f"{_end(state)}{hint}")
    place = rollback.place_of(state, request.step)
    if request.only_say:
        return wire.Done(sentence=rollback.consequences(state, place), step=request.step)
    return wire.Done(sentence=rollback.roll_back(transition, place, by), step=request.step)


def _set(transition: Transition, request: wire.SteerRequest, by: str) -> str:
    state, run = transition.state, changed_run(transition.state, request)
    before, value = (value_of(each, request.key) for each in (state.run, run))
    if value == before:
        return f"{request.key} is {value} already"
    since = _next_round(state) if request.key in OF_THE_OPTIMIZER else 0
    transition.emit(changed := ev.RunChanged(by, request.key, value, before, since))
    transition.set_run(run)
    if run.cluster.lease != state.run.cluster.lease:  # nodes do not know the new lease yet
        transition.set_members(replace(transition.state.members, hearing=transition.now))
    if run.checkpoints != state.run.checkpoints:
        checkpoints.place_changed(transition)
    if state.stopped:  # the run was complete
        transition.enter(Gathering(transition.now, "the run has more steps now"))
        transition.state = replace(transition.state.afresh(), exit_code=None)
    return changed.narrate() + (_scheduled(transition.state, since) if request.key == "train.learning_rate" else "")


def _done(state: State) -> int:
    """How many of the run file's steps are done."""
    return state.rounds.progress(state.ledger.training.step)


def _next_round(state: State) -> int:
    """The first step that is not part of a round that has begun. Without rounds, that is the next step."""
    step, rounds = state.ledger.training.step, state.rounds
    return (step if rounds.at_rest(step) else rounds.next_rest(step)) + 1


def _scheduled(state: State, step: int) -> str:
    """The learning rate of the schedule in this step, as a sentence; empty: it equals the rate that was set."""
    train = state.message.train
    rate = learning_rate(train, step, rounds=state.rounds)
    return f". In step {step} the schedule makes it {rate:.3g}" if rate != train.learning_rate else ""


def _steer(transition: Transition, wish: wire.SteerRequest.Wish, by: str) -> str:
    hold = transition.state.ledger.hold
    match wish:
        case wire.SteerRequest.CONTINUE:
            if hold is not None:
                transition.emit(ev.RunContinued(by))
            return "the run is not paused" if hold is None else "the run goes on"
        case wire.SteerRequest.FROM_WEIGHTS | wire.SteerRequest.FROM_START:
            told = rollback.go_on_from(transition, weights=wish == wire.SteerRequest.FROM_WEIGHTS, by=by)
            if hold is not None:
                transition.emit(ev.RunContinued(by))
            return told
        case wire.SteerRequest.STOP_NOW:
            put_down(transition, by)
            return "the run stops now"
        case _:
            wanted = ev.RunPaused(by, ends=wish == wire.SteerRequest.STOP)
            if hold is not None and hold.ends == wanted.ends:
                return hold.narrate()
            transition.emit(wanted)
            return wanted.narrate()


def stop_when_safe(transition: Transition) -> None:
    """The rule: a run that is to stop does so when no step is under way and the state of its last step is safe, or no connected
    node has that state."""
    state, phase, hold = transition.state, transition.state.phase, transition.state.ledger.hold
    if state.stopped or hold is None or not hold.ends or not isinstance(phase, Gathering | Switching):
        return
    step = state.ledger.training.step
    gone = isinstance(phase, Gathering) and transition.now >= phase.since + GRACE_LEASES * state.lease
    if step == 0 or state.ledger.copies.is_safe(step) or (gone and not state.members.sessions):
        put_down(transition, hold.by)
