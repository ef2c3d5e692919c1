"""Whether a step that was interrupted goes on from where it stood, where work is audited.

Such a step cannot be audited: part of what was sent belongs to an earlier generation. So a member's word is not enough to resume
one: a node must have left, or a deadline must have passed. A member can cause both. So only one step in a while is resumed.
Every other interrupted step starts from its beginning.
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

STEPS_BETWEEN = 10
"""The least number of steps between two that are resumed."""


def interrupted(transition: Transition, phase: Stepping, *, by_a_word: bool) -> None:
    """Notes whether the step in hand may go on. ``by_a_word``: nothing but what a member says interrupts it."""
    memory = transition.state.resuming
    undone = memory.resumed is not None and memory.resumed >= phase.step
    due = memory.resumed is None or undone or phase.step > memory.resumed + STEPS_BETWEEN
    goes_on = phase.step if due and not by_a_word else None
    transition.state = replace(transition.state, resuming=replace(memory, goes_on=goes_on))


def committed(transition: Transition, phase: Stepping) -> None:
    if phase.resumed:
        memory = transition.state.resuming
        transition.state = replace(transition.state, resuming=replace(memory, resumed=phase.step))


def counts_from(state: State, plan: Plan) -> int:
    """Since which generation work on the next step counts under this plan, which is about to be adopted."""
    training = state.ledger.training
    goes_on = not state.run.trust.audits or state.resuming.goes_on == training.step + 1
    same_samples = plan.owed == training.debts.adopted[-1]
    return training.counts_from if goes_on and same_samples else plan.generation


def counted(transition: Transition, node: str, progress: wire.Progress) -> wire.Progress:
    """The part of a node's reported progress that counts: nothing, if the plan starts the step from its beginning."""
    ledger = transition.state.ledger
    if ledger.training.counts_from < ledger.training.generation or not (
        progress.activations or progress.gradients or progress.finished
    ):
        return progress
    transition.log(f"ignored what {node} says that it has of step {ledger.training.step + 1}: it begins anew")
    return wire.Progress()
