"""Whether a step that was interrupted goes on from where it stood, where work is audited.

Such a step cannot be audited: part of what was sent belongs to an earlier generation. So only one goes on whose deadline has
passed, which shows at whom it stands, and never two after each other: a member can cause that. Every other interrupted step
starts from its beginning.
"""

from __future__ import annotations

from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def counts_from(state: State, plan: Plan) -> int:
    """Since which generation work on the next step counts under this plan, which is about to be adopted."""
    training, last = state.ledger.training, state.ledger.training.last
    due = state.overdue == training.step + 1 and not (last is not None and last.resumed)
    goes_on = due or not state.run.trust.audits
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
