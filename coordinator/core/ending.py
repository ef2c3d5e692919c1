"""How a run ends: finished, failed, or stopped, so that a later process goes on with it."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.transition import HangUp, Send, Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def fail(transition: Transition, reason: str) -> None:
    transition.emit(ev.RunFailed(transition.state.ledger.training.step, reason))
    _say_goodbye(transition, wire.Finish(completed=False, reason=reason), 1)


def conclude(transition: Transition) -> None:
    """Ends the run: no step follows, and the state of the last one is safe."""
    ledger, hold = transition.state.ledger, transition.state.ledger.hold
    step = ledger.training.step
    checkpoint = ledger.copies.checkpoints[step]
    if step < transition.state.last_step and hold is not None:
        put_down(transition, hold.by)
    else:
        what = "weights are in" if checkpoint.weights else "checkpoint is"
        # Nodes repeat this sentence, on machines that may have a folder with the same name.
        where = " on the coordinator's machine" if transition.state.run.keeps_checkpoints_itself else ""
        trained = "the one step is trained" if step == 1 else f"all {step} steps are trained"
        reason = f"{trained}; the {what} {checkpoint.folder}{where}"
        transition.emit(ev.RunFinished(step, reason))
        _say_goodbye(transition, wire.Finish(completed=True, reason=reason), 0)


def put_down(transition: Transition, by: str) -> None:
    """Ends this process because an operator stops the run. Nodes leave, and another process goes on with the run."""
    ledger = transition.state.ledger
    step, kept = ledger.training.step, ledger.copies.checkpoint_step
    safe = "" if ledger.copies.is_safe(step) else f", and the newest checkpoint is of step {kept}"
    reason = f"{by} stopped the run after step {step}{safe}; the same `dtfm-coordinator serve` goes on with it"
    transition.emit(ev.RunStopped(step, reason))
    _say_goodbye(transition, wire.Finish(stopped=True, reason=reason), 0)


def stop(transition: Transition, reason: str) -> None:
    """Ends this process, on request. Nodes keep their state, and wait for the next process."""
    if transition.state.stopped:
        return
    transition.emit(ev.CoordinatorStopped(reason))
    sessions = transition.state.members.sessions
    transition.commands.extend(HangUp(session.stream) for session in sessions.values())
    transition.set_members(replace(transition.state.members, sessions={}))
    _say_goodbye(transition, wire.Finish(completed=False, reason=reason), 1)


def tell_end(transition: Transition, stream: int) -> None:
    """Tells a node that was away when the run ended how it ended."""
    outcome, step = transition.state.ledger.outcome, transition.state.ledger.training.step
    assert outcome is not None
    finish = wire.Finish(completed=outcome.completed, reason=f"The run is over, step {step}: {outcome.reason}")
    transition.commands += [Send(stream, wire.CoordinatorMessage(finish=finish)), HangUp(stream)]


def _say_goodbye(transition: Transition, message: wire.Finish, exit_code: int) -> None:
    transition.send(transition.state.members.sessions, wire.CoordinatorMessage(finish=message))
    transition.end_question(replace(transition.state.planner, chosen=None), False, message.reason)
    transition.state = replace(transition.state, exit_code=exit_code)
