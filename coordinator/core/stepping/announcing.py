"""What is announced with a commit: the next step, what else is due now, or a pause.

Stepping -> Stepping; Stepping -> Pausing by a commit with pause. Where the last evaluation is audited, the last commit leads to a
step that is only voted on (last_evaluation.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from dtfm.coordinator.core.replanning import leaver_is_stuck
from dtfm.coordinator.core.safekeeping import snapshot, standby
from dtfm.coordinator.core.state import Pausing, Stepping
from dtfm.coordinator.core.stepping import last_evaluation, post_commit
from dtfm.coordinator.core.timeouts import step_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.protos import MOST_HELD_OUT_AUDITED, control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def announce(transition: Transition, step: int, plan: Plan, gradient_norm: float) -> None:
    """Sends the commit of ``step``, which says what the nodes do next."""
    state, run = transition.state, transition.state.run
    last, stuck = step == run.train.steps, leaver_is_stuck(transition.state)
    evaluate = last or _is_due(step, run.train.evaluate_every)
    switch = state.planner.chosen is not None and not standby.still_copying(state)
    held_out = run.train.evaluation_samples // run.train.micro_batch
    named = evaluate and run.trust.audits > 0 and held_out <= MOST_HELD_OUT_AUDITED  # in the next vote, as nodes know
    only_evaluation = last and named and last_evaluation.can_be_audited(state, plan)
    commit = wire.Commit(
        generation=plan.generation,
        step=step,
        gradient_norm=gradient_norm,
        evaluate=evaluate,
        snapshot=snapshot.begin(transition, step, checkpoint=last or stuck or _is_due(step, run.checkpoint.every)),
        pause=(last or stuck or switch) and not only_evaluation,
        only_evaluation=only_evaluation,
    )
    audited = named and not commit.pause
    transition.send(plan.nodes, wire.CoordinatorMessage(commit=commit))
    if evaluate:
        post_commit.expect_evaluation(transition, step, plan, audited=audited)
    state, phase = transition.state, transition.state.phase
    if commit.pause:
        transition.enter(Pausing(transition.now + state.patience, for_leaver=stuck and not switch and not last))
    else:
        copying = any(s.standby and s.standby.caught_up is None for s in state.members.sessions.values())
        alone = not (state.evaluations or state.safekeeping.snapshots or copying)
        deadline = transition.now + patience(transition, usual=alone)
        committed_by = phase.commit_by if isinstance(phase, Stepping) and phase.commit_by is not None else -math.inf
        begun = Stepping(step + 1, transition.now, deadline, committed_by=committed_by)
        transition.enter(replace(begun, held_out=held_out if audited else 0, only_evaluation=only_evaluation))


def patience(transition: Transition, *, usual: bool) -> float:
    """Seconds for the step that begins."""
    state = transition.state
    return step_patience(
        state.lease, state.ledger.training.step_seconds, usual=usual, overdue=len(state.ledger.trust.waited_for)
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
