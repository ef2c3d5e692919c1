"""Whether a step that was interrupted goes on from where it stood, where work is audited.

Nobody can do such a step again: part of what was sent belongs to an earlier generation. So no member can bring it about by its
word alone: a node must have left, or a deadline have passed. As both can be brought about too, it happens once in a while, and
the next step is audited for certain. What is interrupted otherwise begins anew.
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.transition import Transition
from dtfm.protos import control_pb2 as wire

STEPS_BETWEEN = 10
"""After a step that went on from where it stood, so many are committed that did not."""


def interrupted(transition: Transition, phase: Stepping, *, by_a_word: bool) -> None:
    """Notes whether the step in hand may go on. ``by_a_word``: nothing but what a member says interrupts it."""
    memory = transition.state.auditing
    undone = memory.resumed is not None and memory.resumed >= phase.step
    due = memory.resumed is None or undone or phase.step > memory.resumed + STEPS_BETWEEN
    transition.state = replace(
        transition.state, auditing=replace(memory, goes_on=phase.step if due and not by_a_word else None)
    )


def committed(transition: Transition, phase: Stepping) -> None:
    if phase.resumed:
        memory = transition.state.auditing
        transition.state = replace(transition.state, auditing=replace(memory, resumed=phase.step))


def counts_from(state: State, generation: int) -> int:
    """Since which generation work on the next step counts under the plan that gets this ``generation``."""
    ledger = state.ledger
    goes_on = not state.run.trust.audits or state.auditing.goes_on == ledger.step + 1
    return ledger.counts_from if goes_on else generation


def counted(transition: Transition, node: str, progress: wire.Progress) -> wire.Progress:
    """What counts of the progress that a node reports: nothing under a plan with which the step begins anew."""
    ledger = transition.state.ledger
    if ledger.counts_from < ledger.generation or not (progress.activations or progress.gradients or progress.finished):
        return progress
    transition.log(f"ignored what {node} says that it has of step {ledger.step + 1}: it begins anew")
    return wire.Progress()


def is_owed(state: State) -> bool:
    """Whether the step in hand is audited for certain, as the last one could not be."""
    return state.ledger.last is not None and state.ledger.last.resumed
