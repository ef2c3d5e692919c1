"""The commit of a step: when it is due, its learning rate, and what goes into the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dtfm.coordinator.core.copies import agreed_state, keeping_up
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.plan import drift, showing
from dtfm.coordinator.core.step import outer_steps, spikes
from dtfm.coordinator.core.step.after_commit import announce
from dtfm.coordinator.core.step.norms import counted, of_changes, of_own_changes
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.plan_pb2 import CONSTANT, LINEAR, WARMUP_STABLE_DECAY, Run
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

MOST_TIMES = 1e9
"""The largest multiple of the bound that the log records for a clipped gradient."""


TIMED_STEPS, TIMED_EVERY = 1000, 16
"""The first TIMED_STEPS steps of a run, and the first step of each plan, are logged with each node's times. Of later steps every
TIMED_EVERY-th is. Otherwise times would fill most of a long log."""


def commit_if_due(transition: Transition) -> None:
    """The rule: commits a step that all have voted for, when no audit waits and each stage's new state will be on two machines.
    At ``commit_by`` it stops waiting for the second machine (see `keeping_up.commit_waits_for`)."""
    phase = transition.state.phase
    if transition.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None or phase.audits:
        return
    if transition.now >= phase.commit_by or not keeping_up.commit_waits_for(transition.state):
        commit(transition, phase)


def commit(transition: Transition, phase: Stepping) -> None:
    """Commits and announces a step that all have voted for, if nothing is known to be wrong with it."""
    state, ledger, plan = transition.state, transition.state.ledger, transition.state.ledger.training.in_force
    last = [phase.votes[node] for stage in plan.last_stages for node in stage.replicas]
    samples, exchanges = sum(vote.samples for vote in last), state.rounds.exchanges(phase.step)
    norms = of_changes(plan, phase.votes) if exchanges else counted(transition, phase.votes)
    before = ledger.training.last
    known = before.loss if before is not None else 0.0
    looked = outer_steps.heard(ledger, phase.votes, phase.look_at)
    is_first = before is None or before.generation != plan.generation
    is_timed = is_first or phase.step <= TIMED_STEPS or phase.step % TIMED_EVERY == 0
    timed = sorted(phase.votes.items()) if is_timed else ()
    agreed_state.by_stage(transition, phase.votes)
    transition.emit(
        ev.StepCommitted(
            step=phase.step,
            generation=plan.generation,
            loss=known if exchanges else math.fsum(vote.loss_sum for vote in last) / samples,
            tokens=samples * ledger.description.tokens_per_sample,
            gradient_norm=_root_mean_square([*norms.values()]),
            seconds=round(transition.now - phase.since, 6),
            samples=samples,
            compute_seconds={node: round(vote.compute_seconds, 3) for node, vote in timed},
            wait_seconds={node: round(vote.wait_seconds, 3) for node, vote in timed},
            resumed=phase.resumed,
            learning_rate=learning_rate(state.message.train, phase.step, ledger.optimizer.learning_rate, state.rounds),
            island_norms={str(island): norm for island, norm in norms.items()} if len(norms) > 1 else {},
            exchange=exchanges,
            outer=outer_steps.chosen(state, phase.step, looked) if exchanges else None,
            looked=looked,
            change_norms={str(i): norm for i, norm in of_own_changes(plan, phase.votes).items()} if exchanges else {},
        )
    )
    if clipped := _clipped(phase.votes):
        transition.emit(ev.GradientsClipped(phase.step, plan.generation, clipped))
    if not exchanges:
        spikes.look(transition, "training")
        drift.committed(transition, phase.votes)
        showing.committed(transition, phase.votes)
    announce(transition, plan)


def _root_mean_square(norms: Sequence[float]) -> float:
    return norms[0] if len(norms) == 1 else math.sqrt(math.fsum(norm**2 for norm in norms) / len(norms))


def _clipped(votes: Mapping[str, wire.StepReady]) -> dict[str, dict[str, float]]:
    """The votes' reports of clipped gradients of other nodes, as in the event."""
    told = {by: {each.node: min(each.worst, MOST_TIMES) for each in vote.clipped} for by, vote in votes.items()}
    return {by: whose for by, whose in sorted(told.items()) if whose}


def learning_rate(train: Run.Train, step: int, highest: float | None = None, rounds: Rounds = NO_ROUNDS) -> float:
    """The learning rate of ``step`` (from 1): a pure function of the schedule, the step, the ``highest`` rate, by default the
    run's, and the ``rounds`` in force. If these have larger batches, the schedule goes by the run file's steps that are done
    after the step, and the rate follows the root of the batch.

    It rises linearly to the highest rate during the warm-up. Then it falls to the final fraction of the highest rate, which it
    has at the last step: along a cosine or along a line. With warmup-stable-decay (Hu et al., arXiv 2404.06395) it falls along
    a line only in the last decay_steps. A constant schedule stays at the highest rate.
    """
    highest, step = train.learning_rate if highest is None else highest, rounds.progress(step)
    highest *= math.sqrt(rounds.batches_each)
    if step <= train.warmup_steps:
        return highest * step / train.warmup_steps
    if train.schedule == CONSTANT:
        return highest
    first = train.warmup_steps  # the last step at the full rate
    if train.schedule == WARMUP_STABLE_DECAY:
        first = max(first, train.steps - train.decay_steps)
    fallen = min(max(step - first, 0) / max(train.steps - first, 1), 1.0)
    left = 1 - fallen if train.schedule in (LINEAR, WARMUP_STABLE_DECAY) else 0.5 * (1 + math.cos(math.pi * fallen))
    final = train.final_learning_rate_fraction
    return highest * (final + (1 - final) * left)
