"""The commit of a step: when it is due, and what goes into the log."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dtfm.coordinator.core.copies import agreed_state, standby
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.plan import drift, resumption, showing
from dtfm.coordinator.core.step.announcing import announce
from dtfm.coordinator.core.step.learning_rate import learning_rate
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire

MOST_TIMES = 1e9
"""The largest number that the log has for how many times over the bound a clipped gradient was."""


def commit_if_due(transition: Transition) -> None:
    """The rule: commits a step that all have voted for, once nobody is awaited who repeats work of it, and each stage's new state
    will be on two machines, or at ``commit_by`` (see `standby.commit_waits_for`)."""
    phase = transition.state.phase
    if transition.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None or phase.audits:
        return
    if transition.now >= phase.commit_by or not standby.commit_waits_for(transition.state):
        commit(transition, phase)


def commit(transition: Transition, phase: Stepping) -> None:
    """Commits and announces a step for which all have voted, and of which nothing is known to be wrong."""
    state, plan = transition.state, transition.state.ledger.training.in_force
    squared_norm = math.fsum(phase.votes[stage.replicas[0]].squared_gradient_norm for stage in plan.stages)
    last = [phase.votes[node] for node in plan.stages[-1].replicas]
    samples = sum(vote.samples for vote in last)
    agreed_state.by_stage(transition, phase.votes)
    transition.emit(
        ev.StepCommitted(
            step=phase.step,
            generation=plan.generation,
            loss=math.fsum(vote.loss_sum for vote in last) / samples,
            tokens=samples * state.ledger.description.tokens_per_sample,
            gradient_norm=math.sqrt(squared_norm),
            seconds=round(transition.now - phase.since, 6),
            samples=samples,
            compute_seconds={node: round(vote.compute_seconds, 3) for node, vote in sorted(phase.votes.items())},
            wait_seconds={node: round(vote.wait_seconds, 3) for node, vote in sorted(phase.votes.items())},
            resumed=phase.resumed,
            learning_rate=learning_rate(state.message.train, phase.step),
        )
    )
    if clipped := _clipped(phase.votes):
        transition.emit(ev.GradientsClipped(phase.step, plan.generation, clipped))
    resumption.committed(transition, phase)
    drift.committed(transition, phase.votes)
    showing.committed(transition, phase.votes)
    announce(transition, plan)


def _clipped(votes: Mapping[str, wire.StepReady]) -> dict[str, dict[str, float]]:
    """What nodes of the plan say of each other's gradients, as in the event."""
    told = {by: {each.node: min(each.worst, MOST_TIMES) for each in vote.clipped} for by, vote in votes.items()}
    return {by: whose for by, whose in sorted(told.items()) if whose}
