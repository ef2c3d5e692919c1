"""A step from its beginning to its commit or abort, as the votes have it.

Switching -> Stepping when all nodes are ready for the plan; Stepping -> Stepping by a commit; Stepping -> Pausing by a commit
with pause; Stepping -> Switching by an abort; Stepping -> Gathering when a node of the plan or a link is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core import drift, post_commit
from dtfm.coordinator.core.ending import fail
from dtfm.coordinator.core.messages import beginnings
from dtfm.coordinator.core.plan_adoption import again, regroup
from dtfm.coordinator.core.replanning import leaver_is_stuck
from dtfm.coordinator.core.safekeeping import snapshot, standby
from dtfm.coordinator.core.state import ATTEMPTS, Destination, Pausing, Stepping, Switching
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation import check_codecs, check_progress, check_vote, is_finite, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import NODE_LEFT, PEER_LOST
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

NORM_TOLERANCE = 1e-4
"""Replicas of a stage hold the same reduced gradient, but devices of different kinds may sum its squares in another order."""

MOST_TIMES = 1e9
"""The log says of clipped gradients that they were at most so many times over the bound."""


def plan_ready(transition: Transition, node: str, ready: wire.PlanReady) -> None:
    """A node of the plan holds its state. Once all do, training goes on. If all steps are trained, the work after the last
    commit is repeated, since it was interrupted."""
    phase, ledger, run = transition.state.phase, transition.state.ledger, transition.state.run
    if not isinstance(phase, Switching) or ready.generation != ledger.generation or node not in phase.awaiting:
        return
    assert ledger.plan is not None
    check_progress(ready.progress, ledger.plan, node)
    codecs = check_codecs(ready.codecs, ledger.plan, node)
    phase = replace(
        phase,
        awaiting=phase.awaiting - {node},
        progress={**phase.progress, node: ready.progress},
        codecs={**phase.codecs, node: codecs} if codecs else phase.codecs,
    )
    transition.enter(phase)
    if phase.awaiting:
        return
    step = ledger.step + 1
    finished = {number for progress in phase.progress.values() for number in progress.finished}
    transition.emit(ev.PlanStarted(ledger.generation, step, len(finished), phase.codecs))
    drift.forget(transition)
    if ledger.step >= run.train.steps and ledger.last is not None:
        _announce(transition, ledger.step, ledger.plan, ledger.last.gradient_norm)
        return
    resumed = any(p.activations or p.gradients or p.finished for p in phase.progress.values())
    transition.enter(Stepping(step, transition.now, transition.now + transition.state.patience, resumed=resumed))
    for nodes, begin in beginnings(ledger.plan, step, phase.progress):
        transition.send(nodes, wire.CoordinatorMessage(begin=begin))


def step_ready(transition: Transition, node: str, vote: wire.StepReady) -> None:
    """A node's vote. After the last one the step can be committed, see `commit_if_due`."""
    phase, plan = transition.state.phase, transition.state.ledger.plan
    if not _is_current(transition, vote.generation, vote.step) or plan is None or node not in plan.nodes:
        transition.log(
            f"ignored a vote of {node} for step {vote.step} of generation {vote.generation}: not in progress"
        )
        return
    assert isinstance(phase, Stepping)
    check_vote(vote)
    if node in phase.votes:
        transition.log(f"ignored a second vote of {node} for step {vote.step}")
        return
    if not is_finite(vote.squared_gradient_norm, vote.loss_sum):
        _abort(transition, wire.NON_FINITE, node, "its loss or gradient norm is NaN or infinite")
        return
    phase = replace(phase, votes={**phase.votes, node: vote})
    if phase.votes.keys() == set(plan.nodes):
        phase = replace(phase, commit_by=transition.now + standby.commit_patience(transition.state))
    transition.enter(phase)


def commit_if_due(transition: Transition) -> None:
    """Commits a step that all have voted for, if the votes agree: once each stage's new state will be on two machines, or at
    ``commit_by`` (see `standby.commit_waits_for`)."""
    phase = transition.state.phase
    if transition.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None:
        return
    if transition.now >= phase.commit_by or not standby.commit_waits_for(transition.state):
        _commit(transition, phase)


def step_failed(transition: Transition, node: str, message: wire.StepFailed) -> None:
    plan, ledger = transition.state.ledger.plan, transition.state.ledger
    sentence = shorten(message.sentence)
    if isinstance(transition.state.phase, Pausing) and (message.generation, message.step - 1) == (
        ledger.generation,
        ledger.step,
    ):
        if ledger.step in transition.state.evaluations:
            post_commit.evaluation_lost(transition, ledger.step, f"{node}: {sentence}")
        return
    if not _is_current(transition, message.generation, message.step) or plan is None or node not in plan.nodes:
        transition.log(
            f"ignored a failure of {node} in step {message.step} of generation {message.generation}: not in progress"
        )
        return
    known = message.problem in wire.StepProblem.values()
    problem = message.problem if known and message.problem else wire.INTERNAL
    if problem == wire.PEER_LOST:
        _peer_lost(transition, node, shorten(message.peer, 64), sentence)
    else:
        _abort(transition, problem, node, sentence)


def node_lost(transition: Transition, node: str, reason: str) -> None:
    """A node of the plan has left. A step that all voted for counts, if every stage's new state is still here."""
    phase = transition.state.phase
    if isinstance(phase, Stepping) and phase.commit_by is not None and standby.next_step_survives(transition.state):
        _commit(transition, phase)
        if transition.state.stopped:
            return
    phase, ledger = transition.state.phase, transition.state.ledger
    post_commit.node_left(transition, node)
    snapshot.node_left(transition, node)
    cause = f"{node} left ({reason})"
    if isinstance(phase, Stepping):
        transition.emit(ev.StepAborted(phase.step, ledger.generation, NODE_LEFT, node, cause))
        _send_abort(transition, phase.step, cause)
        regroup(transition, cause)
    elif isinstance(phase, Switching) or not _last_checkpoint_comes(transition):
        regroup(transition, cause)  # otherwise the last checkpoint is under way: the others can finish it


def overdue(transition: Transition, phase: Stepping) -> None:
    """A step exceeded its deadline."""
    plan = transition.state.ledger.plan
    assert plan is not None
    if phase.commit_by is not None:
        return  # the commit comes
    silent = sorted(set(plan.nodes) - phase.votes.keys())
    sentence = f"no vote from {', '.join(silent)} within {transition.state.patience:g} seconds, though heartbeats came"
    _abort(transition, wire.INTERNAL, silent[0], sentence)


def _commit(transition: Transition, phase: Stepping) -> None:
    """All have voted: checks that the votes agree, then commits and announces the step."""
    state, plan = transition.state, transition.state.ledger.plan
    assert plan is not None
    assert state.ledger.described is not None
    squared_norm = 0.0
    for index, stage in enumerate(plan.stages):
        votes = {node: phase.votes[node] for node in stage.replicas}
        digests = {node: vote.state_digest.hex() for node, vote in votes.items()}
        if not post_commit.digests_agree(transition, phase.step, index, digests):
            return
        norms = [vote.squared_gradient_norm for vote in votes.values()]
        if max(norms) - min(norms) > NORM_TOLERANCE * max(norms):
            fail(
                transition,
                f"in step {phase.step} the replicas of stage {index} have different gradients; this is a bug in dtfm",
            )
            return
        squared_norm += norms[0]
    last = [phase.votes[node] for node in plan.stages[-1].replicas]
    samples = sum(vote.samples for vote in last)
    if samples != state.run.train.global_batch:
        wanted = state.run.train.global_batch
        fail(transition, f"step {phase.step} counted {samples} samples, not {wanted}; this is a bug in dtfm")
        return
    loss = math.fsum(vote.loss_sum for vote in last) / samples
    if not (math.isfinite(loss) and 0 <= squared_norm < math.inf):
        _abort(transition, wire.NON_FINITE, plan.stages[-1].replicas[0], "the sum over all nodes is infinite")
        return
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
    if clipped := _clipped(plan, phase.votes):
        transition.emit(ev.GradientsClipped(phase.step, plan.generation, clipped))
    drift.committed(transition, phase.votes)
    _announce(transition, phase.step, plan, math.sqrt(squared_norm))


def _clipped(plan: Plan, votes: Mapping[str, wire.StepReady]) -> dict[str, dict[str, float]]:
    """What nodes of the plan say of each other's gradients, as in the event."""
    nodes = set(plan.nodes)
    told = {
        by: {c.node: min(c.worst, MOST_TIMES) for c in vote.clipped if c.node in nodes - {by}}
        for by, vote in votes.items()
    }
    return {by: whose for by, whose in sorted(told.items()) if whose}


def _announce(transition: Transition, step: int, plan: Plan, gradient_norm: float) -> None:
    """Sends the commit of ``step``, which says what the nodes do next."""
    state, run = transition.state, transition.state.run
    last, stuck = step == run.train.steps, leaver_is_stuck(transition.state)
    evaluate = last or _is_due(step, run.train.evaluate_every)
    switch = state.planner.chosen is not None and not standby.still_copying(state)
    commit = wire.Commit(
        generation=plan.generation,
        step=step,
        gradient_norm=gradient_norm,
        evaluate=evaluate,
        snapshot=snapshot.begin(transition, step, checkpoint=last or stuck or _is_due(step, run.checkpoint.every)),
        pause=last or stuck or switch,
    )
    transition.send(plan.nodes, wire.CoordinatorMessage(commit=commit))
    if evaluate:
        post_commit.expect_evaluation(transition, step, plan)
    deadline, phase = transition.now + state.patience, transition.state.phase
    if commit.pause:
        transition.enter(Pausing(deadline, for_leaver=stuck and not switch and not last))
    else:
        assert isinstance(phase, Stepping)
        assert phase.commit_by is not None
        transition.enter(Stepping(step + 1, transition.now, deadline, committed_by=phase.commit_by))


def _abort(transition: Transition, problem: wire.StepProblem, node: str, sentence: str) -> None:
    """Nobody applies the step. It is tried again under the next generation, unless it failed too often."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    name = wire.StepProblem.Name(problem)
    transition.emit(ev.StepAborted(phase.step, ledger.generation, name, node, sentence))
    reason = f"step {phase.step}: {name} on {node}: {sentence}"
    _send_abort(transition, phase.step, reason)
    if transition.state.ledger.failures >= ATTEMPTS:
        fail(transition, f"{ATTEMPTS} attempts in a row failed at {reason}{_advice(problem)}")
    else:
        again(transition, reason, afresh=True)  # what is wrong may have reached other nodes


def _peer_lost(transition: Transition, node: str, peer: str, sentence: str) -> None:
    """A stream between two nodes broke. If the peer is dead, its own stream tells soon. If the link is, planning goes on without
    it after some attempts."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    transition.emit(ev.StepAborted(phase.step, ledger.generation, PEER_LOST, node, f"lost {peer}: {sentence}"))
    reason = f"step {phase.step}: {node} lost {peer}"
    _send_abort(transition, phase.step, reason)
    known = peer in transition.state.members.sessions and peer != node
    if transition.state.ledger.peer_losses < ATTEMPTS or not known:
        again(transition, reason)
        return
    problem = f"broke {ATTEMPTS} times in a row"
    dead = (ev.Link(node, peer, 0.0, 0.0, problem), ev.Link(peer, node, 0.0, 0.0, problem))
    transition.emit(ev.LinksMeasured(node, dead))
    regroup(transition, f"the link between {node} and {peer} {problem}")


def _last_checkpoint_comes(transition: Transition) -> bool:
    """Whether all steps are trained, and their checkpoint is whole or under way."""
    ledger, steps = transition.state.ledger, transition.state.run.train.steps
    under_way = transition.state.safekeeping.snapshot(Destination.CHECKPOINT, steps)
    return ledger.step >= steps and (steps in ledger.checkpoints or under_way is not None)


def _send_abort(transition: Transition, step: int, reason: str) -> None:
    plan = transition.state.ledger.plan
    assert plan is not None
    abort = wire.Abort(generation=plan.generation, step=step, reason=shorten(reason))
    transition.send(plan.nodes, wire.CoordinatorMessage(abort=abort))


def _is_current(transition: Transition, generation: int, step: int) -> bool:
    phase = transition.state.phase
    return isinstance(phase, Stepping) and (generation, step) == (transition.state.ledger.generation, phase.step)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _advice(problem: wire.StepProblem) -> str:
    match problem:
        case wire.NON_FINITE:
            return ". Lower train.learning_rate, lengthen train.warmup_steps, or look at the data"
        case wire.OUT_OF_MEMORY:
            return ". Lower train.micro_batch, or add nodes"
        case _:
            return ""
