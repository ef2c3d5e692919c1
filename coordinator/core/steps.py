"""A step from its beginning to its commit or abort, as the votes have it.

Switching -> Stepping when all nodes are ready for the plan; Stepping -> Stepping by a commit; Stepping -> Pausing by a commit
with pause; Stepping -> Switching by an abort; Stepping -> Gathering when a node of the plan or a link is lost.
Where the last evaluation is audited, the last commit leads to a step that is only voted on (last_evaluation.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core import drift, last_evaluation, post_commit, same_state, showing
from dtfm.coordinator.core.auditing import conduct, resumption
from dtfm.coordinator.core.auditing.conclusion import Conclusion, Unaudited
from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail, fail_or_suspend
from dtfm.coordinator.core.exclusion import NAN_ADVICE, found, try_without_another
from dtfm.coordinator.core.messages import abort, beginnings
from dtfm.coordinator.core.plan_adoption import again, back_before, plan_failed, regroup
from dtfm.coordinator.core.replanning import leaver_is_stuck
from dtfm.coordinator.core.safekeeping import agreed_state, snapshot, standby
from dtfm.coordinator.core.state import ATTEMPTS, Pausing, Stepping, Switching
from dtfm.coordinator.core.timeouts import step_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import contradiction
from dtfm.coordinator.core.trust.stalls import stalled
from dtfm.coordinator.core.trust.standing import is_alone, weakest
from dtfm.coordinator.core.trust.verdict import (
    Against,
    OfTheLink,
    OfTheRun,
    Unsettled,
    blame,
    blame_for_losses,
    blame_for_waiting,
    named_twice,
    times_suspected,
)
from dtfm.coordinator.core.validation.refusal import is_finite, name_some, shorten
from dtfm.coordinator.core.validation.votes import check_clipped, check_codecs, check_progress, check_vote
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import NODE_LEFT, OVERDUE, PEER_LOST, SETTLED, UNAUDITED, Ledger
from dtfm.protos import MOST_HELD_OUT_AUDITED, control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

MEMORY_ADVICE = ". Lower train.micro_batch, or add nodes"

_NO_MEMORY = wire.StepProblem.Name(wire.OUT_OF_MEMORY)

MOST_TIMES = 1e9
"""The log says of clipped gradients that they were at most so many times over the bound."""


def plan_ready(transition: Transition, node: str, ready: wire.PlanReady) -> None:
    """A node of the plan holds its state. Once all do, training goes on. If all steps are trained, the work after the last
    commit is repeated, since it was interrupted."""
    phase, ledger, run = transition.state.phase, transition.state.ledger, transition.state.run
    if not isinstance(phase, Switching) or ready.generation != ledger.generation:
        return
    if node not in phase.awaiting:
        if node not in phase.states:
            transition.enter(same_state.told(transition.state, phase, node, ready.states))
        return
    assert ledger.plan is not None
    check_progress(ready.progress, ledger.plan, node)
    codecs = check_codecs(ready.codecs, ledger.plan, node, run.network)
    phase = replace(
        phase,
        awaiting=phase.awaiting - {node},
        progress={**phase.progress, node: resumption.counted(transition, node, ready.progress)},
        codecs={**phase.codecs, node: codecs} if codecs else phase.codecs,
    )
    phase = same_state.told(transition.state, phase, node, ready.states)
    transition.enter(phase)
    if phase.awaiting and phase.awaiting <= phase.damaged.keys():
        who, why = next(iter(phase.damaged.items()))
        plan_failed(transition, who, ledger.generation, why, snapshot_damaged=True)
        return
    if phase.awaiting or not same_state.is_agreed(transition, phase):
        return
    step = ledger.step + 1
    finished = {number for progress in phase.progress.values() for number in progress.finished}
    transition.emit(ev.PlanStarted(ledger.generation, step, len(finished), phase.codecs))
    drift.forget(transition)
    if ledger.step >= run.train.steps and ledger.last is not None:
        _announce(transition, ledger.step, ledger.plan, ledger.last.gradient_norm)
        return
    resumed = any(p.activations or p.gradients or p.finished for p in phase.progress.values())
    again = bool(ledger.waited_for)
    at = stalled(ledger.plan, phase.progress) if again else frozenset[str]()
    deadline = transition.now + _patience(transition, usual=again)
    transition.enter(Stepping(step, transition.now, deadline, resumed=resumed, stalled=at))
    for nodes, begin in beginnings(ledger.plan, step, phase.progress):
        transition.send(nodes, wire.CoordinatorMessage(begin=begin))


def step_ready(transition: Transition, node: str, vote: wire.StepReady) -> None:
    """A node's vote. After the last one the step can be committed, see `commit_if_due`."""
    phase, plan = transition.state.phase, transition.state.ledger.plan
    if not is_finite(vote.squared_gradient_norm, vote.loss_sum) and _said_before(transition, node, vote):
        return
    if not _is_current(transition, vote.generation, vote.step) or plan is None or node not in plan.nodes:
        transition.log(
            f"ignored a vote of {node} for step {vote.step} of generation {vote.generation}: not in progress"
        )
        return
    assert isinstance(phase, Stepping)
    described = transition.state.ledger.described
    assert described is not None
    check_vote(vote, described.buckets)
    check_clipped(vote, node, plan, is_open=transition.state.ledger.is_open)
    if node in phase.votes:
        transition.log(f"ignored a second vote of {node} for step {vote.step}")
        return
    if vote.samples != (due := 0 if phase.only_evaluation else _due_samples(transition, plan, node)):
        reason = f"in step {vote.step} it counted {vote.samples} samples; its part in plan {plan.generation} is {due}"
        _settled(transition, Against((node,)), Charge.SAMPLE_COUNT, reason)
        return
    if not is_finite(vote.squared_gradient_norm, vote.loss_sum):
        _abort(transition, wire.NON_FINITE, node, "its loss or gradient norm is NaN or infinite")
        return
    passed = conduct.passed_in(transition.state, phase, node, vote)
    phase = replace(phase, votes={**phase.votes, node: vote}, passed=passed)
    transition.enter(phase)
    if phase.votes.keys() == set(plan.nodes):
        _all_voted(transition, phase)


def _all_voted(transition: Transition, phase: Stepping) -> None:
    """Ends the step if the votes do not agree. Otherwise it waits for its commit, and for audits, if any are drawn."""
    found = contradiction(transition.state.ledger, phase, transition.state.run.train.micro_batch)
    if found is None:
        post_commit.all_voted(transition, phase)
        by = transition.now + (0 if phase.only_evaluation else standby.commit_patience(transition.state))
        transition.enter(replace(phase, voted=transition.now, commit_by=by, audits=conduct.drawn(transition, phase)))
        return
    verdict = found.verdict
    if found.mismatch is not None:
        transition.emit(found.mismatch)
        verdict = replace(verdict, undecided=True)
    _settled(transition, verdict, found.charge, found.reason)
    if found.mismatch is not None and found.verdict.undecided:
        back_before(transition, phase.step - 1, found.reason)


def commit_if_due(transition: Transition) -> None:
    """Commits a step that all have voted for: once nobody is awaited who does work of it again, and each stage's new state will
    be on two machines, or at ``commit_by`` (see `standby.commit_waits_for`)."""
    phase = transition.state.phase
    if transition.state.stopped or not isinstance(phase, Stepping) or phase.commit_by is None:
        return
    match conduct.conclude(transition):
        case Conclusion() as found:
            _settled(transition, found.verdict, found.charge, found.reason)
            if found.back_before is not None:
                back_before(transition, found.back_before, f"what {name_some(found.verdict.members)} did is undone")
            return
        case Unaudited() as found if last_evaluation.is_in_hand(phase):
            last_evaluation.give_up(transition, found.reason)
            return
        case Unaudited() as found:
            _unaudited(transition, found.node, found.reason)
            again(transition, found.reason)
            return
    ripe, phase = transition.now >= phase.commit_by, transition.state.phase
    assert isinstance(phase, Stepping)
    if not phase.audits and (ripe or not standby.commit_waits_for(transition.state)):
        _commit(transition, phase)


def step_failed(transition: Transition, node: str, message: wire.StepFailed) -> None:
    plan, ledger = transition.state.ledger.plan, transition.state.ledger
    sentence = shorten(message.sentence)
    if isinstance(transition.state.phase, Pausing) and (message.generation, message.step - 1) == (
        ledger.generation,
        ledger.step,
    ):
        evaluation = transition.state.evaluations.get(ledger.step)
        if evaluation is not None and node in evaluation.nodes:
            post_commit.evaluation_lost(transition, ledger.step, f"{node}: {sentence}")
        return
    if message.problem != wire.PEER_LOST and _said_before(transition, node, message):
        return
    if not _is_current(transition, message.generation, message.step) or plan is None or node not in plan.nodes:
        transition.log(
            f"ignored a failure of {node} in step {message.step} of generation {message.generation}: not in progress"
        )
        return
    problem = _known(message.problem)
    if problem == wire.PEER_LOST and message.peer in plan.nodes and message.peer != node:
        _peer_lost(transition, node, message.peer, sentence)
    elif problem == wire.PEER_LOST:
        _abort(transition, wire.INTERNAL, node, f"it lost {shorten(repr(message.peer), 64)}, which is no peer of its")
    else:
        _abort(transition, problem, node, sentence)


def node_lost(transition: Transition, node: str, reason: str) -> None:
    """A node of the plan has left. A step that all voted for counts, if no audit is open, and every stage's new state is still
    here."""
    phase = transition.state.phase
    if last_evaluation.is_in_hand(phase):
        last_evaluation.give_up(transition, f"{node} left ({reason})", node)
    if (
        isinstance(phase, Stepping)
        and not phase.only_evaluation
        and phase.commit_by is not None
        and not phase.audits
        and standby.next_step_survives(transition.state)
    ):
        _commit(transition, phase)
        if transition.state.stopped:
            return
    phase, ledger = transition.state.phase, transition.state.ledger
    post_commit.node_left(transition, node)
    snapshot.node_left(transition, node)
    cause = f"{node} left ({reason})"
    if isinstance(phase, Stepping):
        if phase.audits:
            _unaudited(transition, node, cause, leaver=node)
        else:
            transition.emit(ev.StepAborted(phase.step, ledger.generation, NODE_LEFT, node, cause))
            resumption.interrupted(transition, phase, by_a_word=False)
            _send_abort(transition, phase.step, cause)
        regroup(transition, cause)
    elif isinstance(phase, Switching) or not last_evaluation.last_checkpoint_comes(transition):
        regroup(transition, cause)  # otherwise the last checkpoint is under way: the others can finish it


def overdue(transition: Transition, phase: Stepping) -> None:
    """A step exceeded its deadline, though heartbeats came. It is tried again, from where it stands. After ATTEMPTS in a row, it
    is settled against one of those at whom it stood each time."""
    ledger = transition.state.ledger
    plan = ledger.plan
    assert plan is not None
    if phase.commit_by is not None:
        return  # the commit comes
    silent = set(plan.nodes) - phase.votes.keys()
    suspects = phase.stalled & silent or silent
    accused = weakest(ledger, suspects)
    sentence = (
        f"no vote from {name_some(silent)} within {phase.deadline - phase.since:g} seconds, though heartbeats came"
    )
    if phase.only_evaluation:
        last_evaluation.give_up(transition, sentence)
        return
    transition.emit(
        ev.StepAborted(phase.step, ledger.generation, OVERDUE, accused, sentence, suspects=tuple(sorted(suspects)))
    )
    resumption.interrupted(transition, phase, by_a_word=False)
    reason = f"step {phase.step}: {sentence}"
    _send_abort(transition, phase.step, reason)
    match blame_for_waiting(transition.state.ledger):
        case Against() as verdict:
            times = times_suspected(transition.state.ledger, verdict.members[0])
            quarantine(transition, verdict, Charge.STALLED, f"{times} attempts stood at it; {reason}")
            regroup(transition, reason)
        case Unsettled():
            again(transition, reason)


def _commit(transition: Transition, phase: Stepping) -> None:
    """Commits and announces a step for which all have voted, and of which nothing is known to be wrong."""
    if phase.only_evaluation:
        last_evaluation.stands(transition, phase)
        return
    state, plan = transition.state, transition.state.ledger.plan
    assert plan is not None
    assert state.ledger.described is not None
    squared_norm = math.fsum(phase.votes[stage.replicas[0]].squared_gradient_norm for stage in plan.stages)
    last = [phase.votes[node] for node in plan.stages[-1].replicas]
    samples = sum(vote.samples for vote in last)
    loss = math.fsum(vote.loss_sum for vote in last) / samples
    reporters = [node for node, _ in (*state.ledger.failures, *state.also)]
    benched = state.ledger.benched
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
    _announce(transition, phase.step, plan, math.sqrt(squared_norm))


def _clipped(votes: Mapping[str, wire.StepReady]) -> dict[str, dict[str, float]]:
    """What nodes of the plan say of each other's gradients, as in the event."""
    told = {by: {each.node: min(each.worst, MOST_TIMES) for each in vote.clipped} for by, vote in votes.items()}
    return {by: whose for by, whose in sorted(told.items()) if whose}


def _announce(transition: Transition, step: int, plan: Plan, gradient_norm: float) -> None:
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
        deadline = transition.now + _patience(transition, usual=alone)
        committed_by = phase.commit_by if isinstance(phase, Stepping) and phase.commit_by is not None else -math.inf
        begun = Stepping(step + 1, transition.now, deadline, committed_by=committed_by)
        transition.enter(replace(begun, held_out=held_out if audited else 0, only_evaluation=only_evaluation))


def _abort(transition: Transition, problem: wire.StepProblem, node: str, sentence: str) -> None:
    """Nobody applies the step. It is tried again under the next generation, unless it failed too often."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    if phase.only_evaluation:
        last_evaluation.give_up(transition, f"{node}: {sentence}", node)
        return
    conduct.interrupted(transition, phase, node)
    name = wire.StepProblem.Name(problem)
    transition.emit(ev.StepAborted(phase.step, ledger.generation, name, node, sentence))
    reason = f"step {phase.step}: {name} on {node}: {sentence}"
    _send_abort(transition, phase.step, reason)
    advice = _advice(problem)
    failures = _unsettled(ledger, transition.state.ledger.failures)
    also = _unsettled(ledger, transition.state.also)
    lacking = _lack_memory(ledger, (*failures, *also))
    match blame(transition.state.ledger, [who for who, _ in failures], [who for who, _ in also]):
        case OfTheRun() if is_alone(ledger) and not ledger.is_open:
            fail(transition, f"{ATTEMPTS} attempts in a row failed at {reason}{advice}")
        case OfTheRun() if len(lacking) >= 2:  # it is no use to try without one of them
            why = f"{ATTEMPTS} attempts in a row failed at {reason}{MEMORY_ADVICE}"
            fail_or_suspend(transition, lacking, Charge.OUT_OF_MEMORY, why)
            if not transition.state.stopped:
                regroup(transition, reason)
        case OfTheRun():
            try_without_another(transition, f"{ATTEMPTS} attempts in a row failed at {reason}{advice}")
        case Against() as verdict:
            attempts = f"{ATTEMPTS} attempts failed because of it alone; the last at {reason}"
            verdict = replace(verdict, undecided=problem == wire.NON_FINITE)  # that spreads
            quarantine(transition, verdict, _CHARGES[problem], f"{attempts}{advice}")
            regroup(transition, reason)
        case Unsettled():
            again(transition, reason)


def _peer_lost(transition: Transition, node: str, peer: str, sentence: str) -> None:
    """A stream between two nodes broke. If the peer is dead, its own stream tells soon. If the link is, planning goes on without
    it after some attempts; if one of them loses others as well, without that one."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    if phase.only_evaluation:
        last_evaluation.give_up(transition, f"{node} lost {peer}: {sentence}", node, peer)
        return
    conduct.interrupted(transition, phase, node, lost=peer)
    transition.emit(ev.StepAborted(phase.step, ledger.generation, PEER_LOST, node, f"lost {peer}: {sentence}", peer))
    resumption.interrupted(transition, phase, by_a_word=True)
    reason = f"step {phase.step}: {node} lost {peer}"
    _send_abort(transition, phase.step, reason)
    match blame_for_losses(transition.state.ledger):
        case Against() as verdict:
            losses = transition.state.ledger.peer_losses
            quarantine(
                transition, verdict, Charge.PEER_LOST, f"in {len(losses)} attempts in a row nodes lost others; {reason}"
            )
            regroup(transition, reason)
        case OfTheLink():
            problem = f"broke {ATTEMPTS} times in a row"
            dead = (ev.Link(node, peer, 0.0, 0.0, problem), ev.Link(peer, node, 0.0, 0.0, problem))
            transition.emit(ev.LinksMeasured(node, dead))
            regroup(transition, f"the link between {node} and {peer} {problem}")
        case Unsettled():
            again(transition, reason)


def _settled(transition: Transition, verdict: Against, charge: Charge, reason: str) -> None:
    """The votes of a step contradict each other, or the plan. It is aborted, and goes on without those who are wrong."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    conduct.interrupted(transition, phase)
    transition.emit(ev.StepAborted(phase.step, ledger.generation, SETTLED, verdict.members[0], reason))
    _send_abort(transition, phase.step, reason)
    quarantine(transition, verdict, charge, reason)
    regroup(transition, f"{name_some(verdict.members)}: {reason}")


def _unaudited(transition: Transition, node: str, reason: str, leaver: str = "") -> None:
    """The step is aborted, and what was done of it counts no more: what ``node`` did could not be audited, or its leaving has
    interrupted audits."""
    phase, ledger = transition.state.phase, transition.state.ledger
    assert isinstance(phase, Stepping)
    conduct.interrupted(transition, phase, leaver)
    transition.emit(ev.StepAborted(phase.step, ledger.generation, UNAUDITED, node, reason))
    _send_abort(transition, phase.step, reason)


def _said_before(transition: Transition, node: str, said: wire.StepReady | wire.StepFailed) -> bool:
    """Whether the step in hand was aborted already when the node says that it failed. Then that is noted."""
    state, ledger, plan = transition.state, transition.state.ledger, transition.state.ledger.plan
    if _is_current(transition, said.generation, said.step) or said.step != ledger.step + 1:
        return False
    if plan is None or node not in plan.nodes or said.generation not in (ledger.generation - 1, ledger.generation):
        return False
    times = sum(who == node for who, _ in state.also)
    if ledger.failures and ledger.failures[-1][0] != node and times < len(ledger.failures):
        problem = said.problem if isinstance(said, wire.StepFailed) else wire.NON_FINITE
        transition.state = replace(state, also=(*state.also, (node, wire.StepProblem.Name(_known(problem)))))
    return True


def _known(problem: wire.StepProblem) -> wire.StepProblem:
    return problem if problem in wire.StepProblem.values() and problem else wire.INTERNAL


def _unsettled(ledger: Ledger, reports: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """The reports, but those for which strangers have been suspended: what they lack, others may have."""
    settled = {node for node, problem in reports if problem == _NO_MEMORY and ledger.quarantine_of(node) is not None}
    return [(node, problem) for node, problem in reports if not ledger.is_open or node not in settled]


def _lack_memory(ledger: Ledger, reports: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """Of each party that has said twice that its memory is too small, a name."""
    return named_twice(ledger, [node for node, problem in reports if problem == _NO_MEMORY])


def _due_samples(transition: Transition, plan: Plan, node: str) -> int:
    """The samples that the node counts in a step: those of its micro-batches, on the last stage."""
    last, micro_batch = plan.stages[-1], transition.state.run.train.micro_batch
    return sum(load for name, load in zip(last.replicas, last.loads, strict=True) if name == node) * micro_batch


def _patience(transition: Transition, *, usual: bool) -> float:
    """Seconds for the step that begins."""
    state = transition.state
    return step_patience(state.lease, state.ledger.step_seconds, usual=usual, overdue=len(state.ledger.waited_for))


def _send_abort(transition: Transition, step: int, reason: str) -> None:
    plan = transition.state.ledger.plan
    assert plan is not None
    transition.send(plan.nodes, abort(plan, step, reason))


def _is_current(transition: Transition, generation: int, step: int) -> bool:
    phase = transition.state.phase
    return isinstance(phase, Stepping) and (generation, step) == (transition.state.ledger.generation, phase.step)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


_CHARGES = {
    wire.NON_FINITE: Charge.NON_FINITE,
    wire.OUT_OF_MEMORY: Charge.OUT_OF_MEMORY,
    wire.INTERNAL: Charge.STEP_FAILED,
}


def _advice(problem: wire.StepProblem) -> str:
    match problem:
        case wire.NON_FINITE:
            return NAN_ADVICE
        case wire.OUT_OF_MEMORY:
            return MEMORY_ADVICE
        case _:
            return ""
