"""A step that has passed its deadline, though heartbeats came. It is tried again, from where it stands."""

from __future__ import annotations

from dtfm.coordinator.core.findings import Doubt, Setback
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.refusal import name_some
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.steps import OVERDUE


def step_overdue(transition: Transition, phase: Stepping) -> None:
    """Those may be at fault at whom the step stood when it was last interrupted, or all that have not voted."""
    plan = transition.state.ledger.training.in_force
    if phase.commit_by is not None:
        return  # the commit comes
    silent = set(plan.nodes) - phase.votes.keys()
    suspects = tuple(sorted(phase.stalled & silent or silent))
    reason = f"no vote from {name_some(silent)} within {phase.deadline - phase.since:g} seconds, though heartbeats came"
    doubt = Doubt(Charge.STALLED, suspects, reason)
    transition.find(Setback(OVERDUE, suspects[0], reason, (doubt,), by_a_word=False))
