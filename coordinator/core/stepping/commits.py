"""A step that all have voted for is committed: Stepping -> Stepping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core import drift, showing
from dtfm.coordinator.core.auditing import conduct, resumption
from dtfm.coordinator.core.auditing.conclusion import Conclusion, Unaudited
from dtfm.coordinator.core.exclusion import found
from dtfm.coordinator.core.plan_adoption import again, back_before
from dtfm.coordinator.core.safekeeping import agreed_state, standby
from dtfm.coordinator.core.state import Stepping
from dtfm.coordinator.core.stepping import last_evaluation, post_commit
from dtfm.coordinator.core.stepping.aborts import settled, unaudited
from dtfm.coordinator.core.stepping.announcing import announce
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.refusal import name_some
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire

MOST_TIMES = 1e9
"""The largest number that the log has for how many times over the bound a clipped gradient was."""


def commit_if_due(transition: Transition) -> None:
    """Commits a step that all have voted for: once nobody is awaited who does work of it again, and each stage's new state will
    be on two machines, or at ``commit_by`` (see `standby.commit_waits_for`)."""
    phase = transition.state.phase
    if transition.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None:
        return
    match conduct.conclude(transition):
        case Conclusion() as found:
            settled(transition, found.verdict, found.charge, found.reason)
            if found.back_before is not None:
                back_before(transition, found.back_before, f"what {name_some(found.verdict.members)} did is undone")
            return
        case Unaudited() as found if last_evaluation.is_in_hand(phase):
            last_evaluation.give_up(transition, found.reason)
            return
        case Unaudited() as found:
            unaudited(transition, found.node, found.reason)
            again(transition, found.reason)
            return
    ripe, phase = transition.now >= phase.commit_by, transition.state.phase
    assert isinstance(phase, Stepping)
    if not phase.audits and (ripe or not standby.commit_waits_for(transition.state)):
        commit(transition, phase)


def commit(transition: Transition, phase: Stepping) -> None:
    """Commits and announces a step for which all have voted, and of which nothing is known to be wrong."""
    if phase.only_evaluation:
        last_evaluation.stands(transition, phase)
        return
    state, plan = transition.state, transition.state.ledger.training.plan
    assert plan is not None
    assert state.ledger.described is not None
    squared_norm = math.fsum(phase.votes[stage.replicas[0]].squared_gradient_norm for stage in plan.stages)
    last = [phase.votes[node] for node in plan.stages[-1].replicas]
    samples = sum(vote.samples for vote in last)
    loss = math.fsum(vote.loss_sum for vote in last) / samples
    reporters = [node for node, _ in (*state.ledger.trust.failures, *state.also)]
    benched = state.ledger.trust.benched
    post_commit.audited(transition, phase)
    agreed_state.by_stage(transition, agreed_state.told_in_votes(phase.votes))
    transition.emit(
        ev.StepCommitted(
            step=phase.step,
            generation=plan.generation,
            loss=loss,
            tokens=samples * state.ledger.described.tokens_per_sample,
            gradient_norm=math.sqrt(squared_norm),
            seconds=transition.now - phase.since,
            samples=samples,
            compute_seconds={node: vote.compute_seconds for node, vote in sorted(phase.votes.items())},
            wait_seconds={node: vote.wait_seconds for node, vote in sorted(phase.votes.items())},
            resumed=phase.resumed,
        )
    )
    if clipped := _clipped(phase.votes):
        transition.emit(ev.GradientsClipped(phase.step, plan.generation, clipped))
    resumption.committed(transition, phase)
    transition.state = replace(transition.state, also=())
    found(transition, benched, reporters)
    drift.committed(transition, phase.votes)
    showing.committed(transition, phase.votes)
    announce(transition, phase.step, plan, math.sqrt(squared_norm))


def _clipped(votes: Mapping[str, wire.StepReady]) -> dict[str, dict[str, float]]:
    """What nodes of the plan say of each other's gradients, as in the event."""
    told = {by: {each.node: min(each.worst, MOST_TIMES) for each in vote.clipped} for by, vote in votes.items()}
    return {by: whose for by, whose in sorted(told.items()) if whose}
