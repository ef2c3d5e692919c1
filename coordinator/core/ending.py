"""How a run ends: finished, failed, or stopped, to be resumed later."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.transition import AnswerPlanNow, HangUp, Stop, Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def finish(transition: Transition, reason: str) -> None:
    transition.emit(ev.RunFinished(transition.state.ledger.training.step, reason))
    _say_goodbye(transition, wire.Finish(completed=True, reason=reason), 0)


def fail(transition: Transition, reason: str) -> None:
    transition.emit(ev.RunFailed(transition.state.ledger.training.step, reason))
    _say_goodbye(transition, wire.Finish(completed=False, reason=reason), 1)


def stop(transition: Transition, reason: str) -> None:
    """This process ends, on request. Nodes keep what they have, and wait for the next process."""
    if transition.state.stopped:
        return
    transition.emit(ev.CoordinatorStopped(reason))
    sessions = transition.state.members.sessions
    transition.commands.extend(HangUp(session.stream) for session in sessions.values())
    transition.set_members(replace(transition.state.members, sessions={}))
    _say_goodbye(transition, wire.Finish(completed=False, reason=reason), 1)


def _say_goodbye(transition: Transition, message: wire.Finish, exit_code: int) -> None:
    transition.send(transition.state.members.sessions, wire.CoordinatorMessage(finish=message))
    planner = transition.state.planner
    for ticket in planner.asked.tickets if planner.asked else ():
        transition.commands.append(
            AnswerPlanNow(ticket, False, transition.state.ledger.training.generation, message.reason)
        )
    transition.set_planner(replace(planner, asked=None, chosen=None))
    transition.state = replace(transition.state, stopped=True)
    transition.commands.append(Stop(exit_code))
