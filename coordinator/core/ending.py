"""How a run ends: finished, failed, or stopped to be resumed."""

from __future__ import annotations

from dtfm.coordinator.core.transition import AnswerPlanNow, HangUp, Stop, Turn
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def finish(turn: Turn, reason: str) -> None:
    turn.emit(ev.RunFinished(turn.state.ledger.step, reason))
    _say_goodbye(turn, wire.Finish(completed=True, reason=reason), 0)


def fail(turn: Turn, reason: str) -> None:
    turn.emit(ev.RunFailed(turn.state.ledger.step, reason))
    _say_goodbye(turn, wire.Finish(completed=False, reason=reason), 1)


def stop(turn: Turn, reason: str, dismiss: bool) -> None:
    """On request: nothing is lost but what came after the last checkpoint. Nodes that are not dismissed keep trying to
    come back."""
    if turn.state.stopped:
        return
    turn.emit(ev.CoordinatorStopped(reason))
    if not dismiss:
        turn.commands.extend(HangUp(session.stream) for session in turn.state.sessions.values())
        turn.set(sessions={})
    _say_goodbye(turn, wire.Finish(completed=False, reason=reason), 1)


def _say_goodbye(turn: Turn, message: wire.Finish, exit_code: int) -> None:
    turn.send(turn.state.sessions, finish=message)
    for ticket in turn.state.planning.tickets if turn.state.planning else ():
        turn.commands.append(AnswerPlanNow(ticket, False, turn.state.ledger.generation, message.reason))
    turn.set(planning=None, chosen=None, stopped=True)
    turn.commands.append(Stop(exit_code))
