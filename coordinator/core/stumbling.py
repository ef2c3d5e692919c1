"""Replaces a tick that raised an exception, which is a bug. It must harm nobody except the sender of the input."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.core.transition import (
    Answer,
    Asked,
    Greeted,
    HangUp,
    Heard,
    Input,
    Ready,
    Rejected,
)
from dtfm.protos import control_pb2 as wire

SENTENCE = "the coordinator stumbled over this; its log has the trace, which is a bug in dtfm"
REFUSAL = Refused(wire.MALFORMED, SENTENCE)


def kind_of(event: Input) -> str:
    """The kind of input in a word or two; for a message, with the message's kind."""
    kind = type(event).__name__
    return f"{kind} {event.message.WhichOneof('message')}" if isinstance(event, Heard) else kind


def after_an_error(state: State, event: Input, now: float) -> tuple[State, Ready]:
    """The state and the commands after an ``event`` that made `tick` raise an exception. Raises nothing.

    The sender is refused. If there is no sender, this process forgets everything beside the ledger and the members, as in a
    restart: the tick may have failed over that.
    """
    match event:
        case Greeted(stream=stream) | Heard(stream=stream):
            with contextlib.suppress(Exception):
                return tick(state, Rejected(stream, SENTENCE), now)
            return state, Ready((), (HangUp(stream),))
        case Asked(ticket=ticket):
            return state, Ready((), (Answer(ticket, REFUSAL),))
        case _:
            fresh = replace(state.afresh(), phase=Gathering(now, SENTENCE))
            waiting = state.planner.asked.tickets if state.planner.asked else ()
            answers = tuple(Answer(ticket, REFUSAL) for ticket in waiting)
            with contextlib.suppress(Exception):
                fresh, ready = tick(fresh, event, now)
                return fresh, Ready(ready.entries, (*answers, *ready.commands))
            return fresh, Ready((), answers)
