"""What takes the place of a tick that raised: a bug, which must harm nobody but whoever sent what it stumbled over."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state import State
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
    """What it is, in a word or two; of a message, which one."""
    kind = type(event).__name__
    return f"{kind} {event.message.WhichOneof('message')}" if isinstance(event, Heard) else kind


def after_an_error(state: State, event: Input, now: float) -> tuple[State, Ready]:
    """The state after ``event``, which `tick` raised for, and what is to be done. Raises nothing.

    Whoever sent it is refused. If nobody did, what this process remembers beside the ledger and the members is forgotten, as by a
    restart: it may be what the tick stumbled over.
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
