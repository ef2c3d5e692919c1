"""What takes the place of a tick that raised: a bug, which must harm nobody but whoever sent what it stumbled over."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from dtfm.coordinator.core.audits import Auditing
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state import Planner, Safekeeping, State
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.core.transition import (
    AnswerAccess,
    AnswerPlanNow,
    EnrolAsked,
    ExpelAsked,
    ForgiveAsked,
    Greeted,
    HangUp,
    Heard,
    Input,
    InviteAsked,
    PlanNow,
    Ready,
    Rejected,
    RevokeAsked,
    SteerAsked,
)
from dtfm.protos import control_pb2 as wire

SENTENCE = "the coordinator stumbled over this; its log has the trace, which is a bug in dtfm"


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
        case InviteAsked() | EnrolAsked() | RevokeAsked() | ExpelAsked() | ForgiveAsked() | SteerAsked():
            return state, Ready((), (AnswerAccess(event.ticket, Refused(wire.MALFORMED, SENTENCE)),))
        case PlanNow():
            return state, Ready((), (AnswerPlanNow(event.ticket, False, state.ledger.training.generation, SENTENCE),))
        case _:
            fresh, answers = _forgetful(state, now)
            with contextlib.suppress(Exception):
                fresh, ready = tick(fresh, event, now)
                return fresh, Ready(ready.entries, (*answers, *ready.commands))
            return fresh, Ready((), answers)


def _forgetful(state: State, now: float) -> tuple[State, tuple[AnswerPlanNow, ...]]:
    """As after a restart, but with the nodes that are here, and the answers to those who wait for the planner."""
    asked, kept = state.planner.asked, state.safekeeping
    fresh = replace(
        state,
        phase=Gathering(now, SENTENCE),
        planner=Planner(number=state.planner.number, has_planned=state.planner.has_planned),
        evaluations={},
        safekeeping=Safekeeping(standby_number=kept.standby_number, unfinished=kept.unfinished),
        speeds={},
        auditing=Auditing(state.auditing.number),
    )
    generation = state.ledger.training.generation
    return fresh, tuple(
        AnswerPlanNow(ticket, False, generation, SENTENCE) for ticket in (asked.tickets if asked else ())
    )
