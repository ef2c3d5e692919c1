"""Training goes back to a snapshot, or to the start, because nobody holds all of the state, or because the state is in doubt."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.copies import snapshot
from dtfm.coordinator.core.copies.availability import Kind, ResumePoint, availability
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos.printable import counted

ORIGINS = {Kind.DISK: "the disks' snapshot", Kind.CHECKPOINT: "the checkpoint", Kind.WEIGHTS: "the weights"}

MOST_UNDONE = 1000
"""The most steps that the run goes back to undo the work of a liar."""


def undo(transition: Transition, since: int, reason: str) -> None:
    """Goes back to a snapshot from before step ``since``, if it is not too far: all later work is in doubt."""
    ledger, step = transition.state.ledger, transition.state.ledger.training.step
    if since >= step:
        return
    then = replace(ledger, copies=ledger.copies.back_to(since))
    before = newest_snapshot(replace(transition.state, ledger=then))
    if step - before.step > MOST_UNDONE:
        transition.log(
            f"what was done since step {since} stays, as undoing it would take {counted(step - before.step, 'step')}"
        )
        return
    go_back(transition, before, f"what was done since step {since} is undone: {reason}")


def newest_snapshot(state: State) -> ResumePoint:
    """The newest snapshot, or the start."""
    return replace(availability(state), memory=()).resume_point()


def go_back(transition: Transition, point: ResumePoint, reason: str, *, in_doubt: bool = True) -> ev.RolledBack:
    """Goes back to a snapshot, or to the start. ``in_doubt``: the steps trained since may be wrong."""
    ledger = transition.state.ledger
    origin = f"from {ORIGINS[point.kind]} of step {point.step}" if point.kind is not None else "from the start"
    weights = point.kind is Kind.WEIGHTS
    moments = "; AdamW's moments begin at zero" if weights else ""
    sentence = f"{reason}; {trained_again(ledger.training.step - point.step)} {origin}{moments}"
    transition.emit(back := ev.RolledBack(point.step, ledger.training.step, sentence, weights=weights))
    snapshot.rolled_back(transition, ledger.copies.checkpoints if in_doubt else ())
    return back


def trained_again(steps: int) -> str:
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} trained again"
