"""What nodes say of the step in hand: that theirs is done, or that it failed."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.auditing import conduct
from dtfm.coordinator.core.plan_adoption import back_before
from dtfm.coordinator.core.safekeeping import standby
from dtfm.coordinator.core.state import Pausing, Stepping
from dtfm.coordinator.core.stepping import post_commit
from dtfm.coordinator.core.stepping.aborts import abort_step, disputed, peer_lost, settled
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import Dispute, contradiction
from dtfm.coordinator.core.trust.apart import may_lose
from dtfm.coordinator.core.trust.verdict import Against
from dtfm.coordinator.core.validation.refusal import is_finite, shorten
from dtfm.coordinator.core.validation.votes import check_clipped, check_loss, check_vote
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def step_ready(transition: Transition, node: str, vote: wire.StepReady) -> None:
    """A node's vote. After the last one the step can be committed, see `commit_if_due`."""
    phase, plan = transition.state.phase, transition.state.ledger.training.plan
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
    check_loss(vote, transition.state.run.model.family)
    check_clipped(vote, node, plan, is_open=transition.state.ledger.is_open)
    if node in phase.votes:
        transition.log(f"ignored a second vote of {node} for step {vote.step}")
        return
    if vote.samples != (due := 0 if phase.only_evaluation else _due_samples(transition, plan, node)):
        reason = f"in step {vote.step} it counted {vote.samples} samples; its part in plan {plan.generation} is {due}"
        settled(transition, Against((node,)), Charge.SAMPLE_COUNT, reason)
        return
    if not is_finite(vote.squared_gradient_norm, vote.loss_sum):
        abort_step(transition, wire.NON_FINITE, node, "its loss or gradient norm is NaN or infinite")
        return
    passed = conduct.passed_in(transition.state, phase, node, vote)
    phase = replace(phase, votes={**phase.votes, node: vote}, passed=passed)
    transition.enter(phase)
    if phase.votes.keys() == set(plan.nodes):
        _all_voted(transition, phase)


def _all_voted(transition: Transition, phase: Stepping) -> None:
    """Ends the step if the votes do not agree. Otherwise it waits for its commit, and for audits, if any are drawn."""
    found = contradiction(transition.state, phase)
    if found is None:
        post_commit.all_voted(transition, phase)
        by = transition.now + (0 if phase.only_evaluation else standby.commit_patience(transition.state))
        transition.enter(replace(phase, voted=transition.now, commit_by=by, audits=conduct.drawn(transition, phase)))
        return
    if isinstance(found, Dispute):
        disputed(transition, found.pairs, found.reason)
        return
    verdict = found.verdict
    if found.mismatch is not None:
        transition.emit(found.mismatch)
        verdict = replace(verdict, undecided=True)
    settled(transition, verdict, found.charge, found.reason)
    if found.mismatch is not None and found.verdict.undecided:
        back_before(transition, phase.step - 1, found.reason)


def step_failed(transition: Transition, node: str, message: wire.StepFailed) -> None:
    plan, ledger = transition.state.ledger.training.plan, transition.state.ledger
    sentence = shorten(message.sentence)
    if isinstance(transition.state.phase, Pausing) and (message.generation, message.step - 1) == (
        ledger.training.generation,
        ledger.training.step,
    ):
        evaluation = transition.state.evaluations.get(ledger.training.step)
        if evaluation is not None and node in evaluation.nodes:
            post_commit.evaluation_lost(transition, ledger.training.step, f"{node}: {sentence}")
        return
    if message.problem != wire.PEER_LOST and _said_before(transition, node, message):
        return
    if not _is_current(transition, message.generation, message.step) or plan is None or node not in plan.nodes:
        transition.log(
            f"ignored a failure of {node} in step {message.step} of generation {message.generation}: not in progress"
        )
        return
    problem = _known(message.problem)
    if problem == wire.PEER_LOST and may_lose(ledger, node, message.peer):
        peer_lost(transition, node, message.peer, sentence)
    elif problem == wire.PEER_LOST:
        abort_step(
            transition,
            wire.INTERNAL,
            node,
            f"it lost {shorten(repr(message.peer), 64)}, with which it exchanges nothing",
        )
    else:
        abort_step(transition, problem, node, sentence)


def _said_before(transition: Transition, node: str, said: wire.StepReady | wire.StepFailed) -> bool:
    """Whether the step in hand was aborted already when the node says that it failed. Then that is noted."""
    state, ledger, plan = transition.state, transition.state.ledger, transition.state.ledger.training.plan
    if _is_current(transition, said.generation, said.step) or said.step != ledger.training.step + 1:
        return False
    if (
        plan is None
        or node not in plan.nodes
        or said.generation not in (ledger.training.generation - 1, ledger.training.generation)
    ):
        return False
    times = sum(who == node for who, _ in state.also)
    if ledger.trust.failures and ledger.trust.failures[-1][0] != node and times < len(ledger.trust.failures):
        problem = said.problem if isinstance(said, wire.StepFailed) else wire.NON_FINITE
        transition.state = replace(state, also=(*state.also, (node, wire.StepProblem.Name(_known(problem)))))
    return True


def _known(problem: wire.StepProblem) -> wire.StepProblem:
    return problem if problem in wire.StepProblem.values() and problem else wire.INTERNAL


def _due_samples(transition: Transition, plan: Plan, node: str) -> int:
    """The samples that the node counts in a step: those of its micro-batches, on the last stage."""
    last, micro_batch = plan.stages[-1], transition.state.run.train.micro_batch
    return sum(load for name, load in zip(last.replicas, last.loads, strict=True) if name == node) * micro_batch


def _is_current(transition: Transition, generation: int, step: int) -> bool:
    phase = transition.state.phase
    return isinstance(phase, Stepping) and (generation, step) == (
        transition.state.ledger.training.generation,
        phase.step,
    )
