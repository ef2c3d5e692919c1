"""What the announcement of a commit tells nodes to do next."""

from __future__ import annotations

import math

from dtfm.coordinator.core.copies import snapshot
from dtfm.coordinator.core.messages import last_commit, outer_message
from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.core.plan.beginning_islands import may_begin_now
from dtfm.coordinator.core.plan.expected import step_seconds
from dtfm.coordinator.core.plan.replanning import leaver_is_stuck, switch_is_due
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step import evaluation, outer_steps, telling, texts
from dtfm.coordinator.core.timeouts import BESIDE, READY_LEASES, STEP_FACTOR, step_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def announce(transition: Transition, plan: Plan) -> None:
    """Sends the commit of the last step."""
    state, run, training = transition.state, transition.state.run, transition.state.ledger.training
    step, rounds, commit = training.step, state.rounds, last_commit(state.ledger)
    assert commit is not None
    at_rest = rounds.at_rest(step)  # otherwise islands have different weights, and only the next step may follow
    last, stuck = at_rest and step >= state.last_step, at_rest and leaver_is_stuck(transition.state)
    ends = last or (at_rest and state.ledger.hold is not None)
    closing = stuck or state.is_closing
    evaluate = last or (at_rest and rounds.is_due(step, run.train.evaluate_every))
    switch = (at_rest or may_begin_now(state)) and switch_is_due(state)
    checkpoint = ends or closing or rounds.is_due(step, run.checkpoint.every)
    then = wire.Commit(
        generation=plan.generation,
        evaluate=evaluate,
        snapshot=at_rest and snapshot.begin(transition, step, checkpoint=checkpoint, last=closing),
        pause=ends or stuck or switch,
        status=telling.status(transition.state),
    )
    commit.MergeFrom(then)
    look_at = () if commit.pause else outer_steps.to_try(state, step + 1)
    commit.look_at.extend(map(outer_message, look_at))
    transition.send(plan.nodes, wire.CoordinatorMessage(commit=commit))
    if evaluate:
        evaluation.expect(transition, step, plan)
        texts.ask(transition, step, plan)
    state, phase = transition.state, transition.state.phase
    if commit.pause:
        for_leaver = stuck and not switch and not ends
        awaiting = state.members.sessions.keys() & plan.nodes
        deadline = transition.now + pause_patience(state)
        transition.enter(Pausing(deadline, frozenset(awaiting), transition.now, for_leaver=for_leaver))
        return
    copying = any(s.standby and s.standby.caught_up is None for s in state.members.sessions.values())
    kept = state.safekeeping
    usual = not (rounds.exchanges(step + 1) or state.evaluation or kept.snapshot or kept.upload or copying)
    deadline = transition.now + step_patience(state.lease, step_seconds(state), usual=usual)
    committed_by = phase.commit_by if isinstance(phase, Stepping) and phase.commit_by is not None else -math.inf
    transition.enter(Stepping(step + 1, transition.now, deadline, committed_by=committed_by, look_at=look_at))


def pause_patience(state: State) -> float:
    """Seconds for confirming a commit, and for the evaluation after it."""
    return READY_LEASES * state.lease + BESIDE * STEP_FACTOR * (step_seconds(state) or 0.0)
