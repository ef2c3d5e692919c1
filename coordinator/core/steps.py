"""The step ledger: votes, and the commit or the abort that follows from them."""

from __future__ import annotations

import math
from dataclasses import replace

from dtfm.coordinator.core import drift, post_commit, snapshot, standby
from dtfm.coordinator.core.ending import fail
from dtfm.coordinator.core.messages import beginnings
from dtfm.coordinator.core.replanning import again, consider, regroup
from dtfm.coordinator.core.state import ATTEMPTS, Pausing, Stepping, Switching
from dtfm.coordinator.core.transition import Turn
from dtfm.coordinator.core.validation import check_codecs, check_progress, check_vote, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import NODE_LEFT, PEER_LOST
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

NORM_TOLERANCE = 1e-4
"""Replicas of a stage hold the same reduced gradient; devices of different kinds may sum its squares in another order."""


def plan_ready(turn: Turn, node: str, ready: wire.PlanReady) -> None:
    """A node of the plan holds its state. Once all do, training goes on; or, where all steps are trained, what follows the last
    commit is done again, as it came to nothing before."""
    phase, ledger, run = turn.state.phase, turn.state.ledger, turn.state.run
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
    turn.set(phase=phase)
    if phase.awaiting:
        return
    step = ledger.step + 1
    finished = {number for progress in phase.progress.values() for number in progress.finished}
    turn.emit(ev.PlanStarted(ledger.generation, step, len(finished), phase.codecs))
    drift.forget(turn)
    if ledger.step >= run.train.steps and ledger.last is not None:
        _announce(turn, ledger.step, ledger.plan, ledger.last.gradient_norm)
        return
    resumed = any(p.activations or p.gradients or p.finished for p in phase.progress.values())
    turn.set(phase=Stepping(step, turn.now, turn.now + turn.state.patience, resumed=resumed))
    for nodes, begin in beginnings(ledger.plan, step, phase.progress):
        turn.send(nodes, begin=begin)
    standby.keep_up(turn)
    consider(turn)


def step_ready(turn: Turn, node: str, vote: wire.StepReady) -> None:
    """A node's vote. After the last one the step can be committed, see `conclude`."""
    phase, plan = turn.state.phase, turn.state.ledger.plan
    if not _current(turn, phase, vote.generation, vote.step) or plan is None or node not in plan.nodes:
        turn.log(f"ignored a vote of {node} for step {vote.step} of generation {vote.generation}: not in progress")
        return
    assert isinstance(phase, Stepping)
    check_vote(vote)
    if node in phase.votes:
        turn.log(f"ignored a second vote of {node} for step {vote.step}")
        return
    if not (math.isfinite(vote.squared_gradient_norm) and math.isfinite(vote.loss_sum)):
        _abort(turn, wire.NON_FINITE, node, "its loss or gradient norm is NaN or infinite")
        return
    phase = replace(phase, votes={**phase.votes, node: vote})
    if phase.votes.keys() == set(plan.nodes):
        phase = replace(phase, commit_by=turn.now + standby.word_patience(turn.state))
    turn.set(phase=phase)


def conclude(turn: Turn) -> None:
    """Commits a step for which all have voted, if they agree; but not before each stage that else rests on one node has a copy
    which has the step too, where such a copy is kept up and comes in time."""
    phase, plan = turn.state.phase, turn.state.ledger.plan
    if turn.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None or plan is None:
        return
    due = standby.words_due(turn.state)
    if due and turn.now < phase.commit_by:
        return
    standby.pass_over(turn, due)
    _count(turn, phase, plan)


def step_failed(turn: Turn, node: str, message: wire.StepFailed) -> None:
    plan, ledger = turn.state.ledger.plan, turn.state.ledger
    if isinstance(turn.state.phase, Pausing) and (message.generation, message.step - 1) == (
        ledger.generation,
        ledger.step,
    ):
        if ledger.step in turn.state.evaluations:
            post_commit.evaluation_lost(turn, ledger.step, f"{node}: {shorten(message.sentence)}")
        return
    if not _current(turn, turn.state.phase, message.generation, message.step) or not plan or node not in plan.nodes:
        turn.log(
            f"ignored a failure of {node} in step {message.step} of generation {message.generation}: not in progress"
        )
        return
    known = message.problem in wire.StepProblem.values()
    problem = message.problem if known and message.problem else wire.INTERNAL
    if problem == wire.PEER_LOST:
        _peer_lost(turn, node, shorten(message.peer, 64), shorten(message.sentence))
    else:
        _abort(turn, problem, node, shorten(message.sentence))


def node_lost(turn: Turn, node: str, reason: str) -> None:
    """A node of the plan has left. A step that all voted for counts, if what it makes of every stage is still here."""
    phase = turn.state.phase
    if isinstance(phase, Stepping) and phase.commit_by is not None and standby.secured(turn.state):
        assert turn.state.ledger.plan is not None
        _count(turn, phase, turn.state.ledger.plan)
        if turn.state.stopped:
            return
    phase, ledger = turn.state.phase, turn.state.ledger
    lost = post_commit.abandon(turn, node)
    cause = f"{node} left ({reason})"
    if isinstance(phase, Stepping):
        assert ledger.plan is not None
        turn.emit(ev.StepAborted(phase.step, ledger.generation, NODE_LEFT, node, cause))
        _send_abort(turn, phase.step, cause)
        regroup(turn, cause)
    elif isinstance(phase, Switching) or ledger.step < turn.state.run.train.steps or ledger.step in lost:
        regroup(turn, cause)
    else:
        post_commit.drained(turn)  # all is trained and on its way to the checkpoint: the others can end it


def overdue(turn: Turn) -> None:
    """A step took longer than patience lasts."""
    phase, plan = turn.state.phase, turn.state.ledger.plan
    assert isinstance(phase, Stepping)
    assert plan is not None
    if phase.commit_by is not None:
        return  # the commit comes
    silent = sorted(set(plan.nodes) - phase.votes.keys())
    sentence = f"no vote from {', '.join(silent)} within {turn.state.patience:g} seconds, though heartbeats came"
    _abort(turn, wire.INTERNAL, silent[0], sentence)


def _count(turn: Turn, phase: Stepping, plan: Plan) -> None:
    """All votes are in: check that they fit together, commit, announce."""
    state = turn.state
    assert state.ledger.described is not None
    squared_norm = 0.0
    for index, stage in enumerate(plan.stages):
        votes = {node: phase.votes[node] for node in stage.replicas}
        digests = {node: vote.state_digest.hex() for node, vote in votes.items()}
        if len(set(digests.values())) > 1:
            turn.emit(ev.DigestMismatch(phase.step, plan.generation, index, digests))
            fail(
                turn,
                f"before step {phase.step} the replicas of stage {index} hold different state; this is a bug in dtfm",
            )
            return
        norms = [vote.squared_gradient_norm for vote in votes.values()]
        if max(norms) - min(norms) > NORM_TOLERANCE * max(norms):
            fail(
                turn,
                f"in step {phase.step} the replicas of stage {index} have different gradients; this is a bug in dtfm",
            )
            return
        squared_norm += norms[0]
    last = [phase.votes[node] for node in plan.stages[-1].replicas]
    samples = sum(vote.samples for vote in last)
    if samples != state.run.train.global_batch:
        wanted = state.run.train.global_batch
        fail(turn, f"step {phase.step} counted {samples} samples, not {wanted}; this is a bug in dtfm")
        return
    loss = math.fsum(vote.loss_sum for vote in last) / samples
    if not (math.isfinite(loss) and 0 <= squared_norm < math.inf):
        _abort(turn, wire.NON_FINITE, plan.stages[-1].replicas[0], "the sum over all nodes is infinite")
        return
    turn.emit(
        ev.StepCommitted(
            step=phase.step,
            generation=plan.generation,
            loss=loss,
            tokens=samples * state.ledger.described.tokens_per_sample,
            gradient_norm=math.sqrt(squared_norm),
            seconds=turn.now - phase.since,
            samples=samples,
            compute_seconds={node: vote.compute_seconds for node, vote in sorted(phase.votes.items())},
            wait_seconds={node: vote.wait_seconds for node, vote in sorted(phase.votes.items())},
            resumed=phase.resumed,
        )
    )
    drift.committed(turn, phase.votes)
    if not phase.resumed and state.timed != plan.generation:
        turn.set(timed=plan.generation)
        standby.keep_up(turn)
    _announce(turn, phase.step, plan, math.sqrt(squared_norm))


def _announce(turn: Turn, step: int, plan: Plan, gradient_norm: float) -> None:
    run = turn.state.run
    last = step == run.train.steps
    evaluate = last or _due(step, run.train.evaluate_every)
    checkpoint = last or turn.state.saving or _due(step, run.checkpoint.every)
    commit = wire.Commit(
        generation=plan.generation,
        step=step,
        gradient_norm=gradient_norm,
        evaluate=evaluate,
        checkpoint=checkpoint,
        pause=last or turn.state.saving or (turn.state.chosen is not None and not standby.awaited(turn.state)),
        backup=snapshot.begin(turn, step, plan, checkpoint),
    )
    turn.send(plan.nodes, commit=commit)
    post_commit.expect(turn, step, evaluate, checkpoint)
    deadline, phase = turn.now + turn.state.patience, turn.state.phase
    if commit.pause:
        turn.set(phase=Pausing(deadline))
    else:
        assert isinstance(phase, Stepping)
        assert phase.commit_by is not None
        turn.set(phase=Stepping(step + 1, turn.now, deadline, committed_by=phase.commit_by))


def _abort(turn: Turn, problem: wire.StepProblem, node: str, sentence: str) -> None:
    """Nobody applies the step; it is tried again under the next generation, unless it failed too often."""
    phase, ledger = turn.state.phase, turn.state.ledger
    assert isinstance(phase, Stepping)
    name = wire.StepProblem.Name(problem)
    turn.emit(ev.StepAborted(phase.step, ledger.generation, name, node, sentence))
    reason = f"step {phase.step}: {name} on {node}: {sentence}"
    _send_abort(turn, phase.step, reason)
    if turn.state.ledger.failures >= ATTEMPTS:
        fail(turn, f"{ATTEMPTS} attempts in a row failed at {reason}{_advice(problem)}")
    else:
        again(turn, reason, afresh=True)  # what is wrong may have gone on to others


def _peer_lost(turn: Turn, node: str, peer: str, sentence: str) -> None:
    """A stream between two nodes broke. Should the peer be dead, its own stream tells soon; should the link be, planning
    goes on without it after some attempts."""
    phase, ledger = turn.state.phase, turn.state.ledger
    assert isinstance(phase, Stepping)
    turn.emit(ev.StepAborted(phase.step, ledger.generation, PEER_LOST, node, f"lost {peer}: {sentence}"))
    reason = f"step {phase.step}: {node} lost {peer}"
    _send_abort(turn, phase.step, reason)
    if turn.state.ledger.peer_losses < ATTEMPTS or peer not in turn.state.sessions or peer == node:
        again(turn, reason)
        return
    problem = f"broke {ATTEMPTS} times in a row"
    dead = (ev.Link(node, peer, 0.0, 0.0, problem), ev.Link(peer, node, 0.0, 0.0, problem))
    turn.emit(ev.LinksMeasured(node, dead))
    regroup(turn, f"the link between {node} and {peer} {problem}")


def _send_abort(turn: Turn, step: int, reason: str) -> None:
    plan = turn.state.ledger.plan
    assert plan is not None
    turn.send(plan.nodes, abort=wire.Abort(generation=plan.generation, step=step, reason=shorten(reason)))


def _current(turn: Turn, phase: object, generation: int, step: int) -> bool:
    return isinstance(phase, Stepping) and (generation, step) == (turn.state.ledger.generation, phase.step)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _advice(problem: wire.StepProblem) -> str:
    match problem:
        case wire.NON_FINITE:
            return ". Lower train.learning_rate, lengthen train.warmup_steps, or look at the data"
        case wire.OUT_OF_MEMORY:
            return ". Lower train.micro_batch, or add nodes"
        case _:
            return ""
