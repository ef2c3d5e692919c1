"""What a commit says that the nodes do next."""

from __future__ import annotations

import math

from dtfm.coordinator.core.copies import snapshot
from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.core.plan.replanning import leaver_is_stuck, switch_is_due
from dtfm.coordinator.core.step import evaluation, telling
from dtfm.coordinator.core.timeouts import step_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.verdict import attempts_since_commit
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def announce(transition: Transition, plan: Plan) -> None:
    """Sends the commit of the last step."""
    state, run, committed = transition.state, transition.state.run, transition.state.ledger.training.last
    assert committed is not None
    step = committed.step
    last, stuck = step == run.train.steps, leaver_is_stuck(transition.state)
    ends = last or state.ledger.hold is not None
    closing = stuck or state.is_closing
    evaluate = last or _is_due(step, run.train.evaluate_every)
    switch = switch_is_due(state)
    commit = wire.Commit(
        generation=plan.generation,
        step=step,
        gradient_norm=committed.gradient_norm,
        learning_rate=committed.learning_rate,
        evaluate=evaluate,
        snapshot=snapshot.begin(
            transition, step, checkpoint=ends or closing or _is_due(step, run.checkpoint.every), last=closing
        ),
        pause=ends or stuck or switch,
        status=telling.status(transition.state),
    )
    transition.send(plan.nodes, wire.CoordinatorMessage(commit=commit))
    if evaluate:
        evaluation.expect(transition, step, plan)
    state, phase = transition.state, transition.state.phase
    if commit.pause:
        for_leaver = stuck and not switch and not ends
        awaiting = state.members.sessions.keys() & plan.nodes
        transition.enter(Pausing(transition.now + state.patience, frozenset(awaiting), for_leaver=for_leaver))
        return
    copying = any(s.standby and s.standby.caught_up is None for s in state.members.sessions.values())
    alone = not (state.evaluation or state.safekeeping.snapshot or state.safekeeping.upload or copying)
    deadline = transition.now + patience(transition, usual=alone)
    committed_by = phase.commit_by if isinstance(phase, Stepping) and phase.commit_by is not None else -math.inf
    transition.enter(Stepping(step + 1, transition.now, deadline, committed_by=committed_by))


def patience(transition: Transition, *, usual: bool) -> float:
    """Seconds for the step that begins."""
    state = transition.state
    last = state.ledger.training.step_seconds
    return step_patience(state.lease, last, usual=usual, overdue=attempts_since_commit(state.ledger, Charge.STALLED))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
