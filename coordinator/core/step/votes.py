"""Nodes' reports about the current step: a node has done its part, has failed, or does not report in time."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.copies import keeping_up
from dtfm.coordinator.core.findings import Doubt, Setback, Unwell
from dtfm.coordinator.core.health.broken_pairs import exchange, may_lose
from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.core.refusal import is_finite, name_some, shorten
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step import evaluation, outer_steps
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust import auditing
from dtfm.coordinator.core.trust.agreement import contradiction
from dtfm.coordinator.core.validation.votes import check_clipped, check_loss, check_vote
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.steps import OVERDUE, PEER_LOST, SETTLED
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

MOST_LOSS = 1e6
"""The largest mean loss of a token, in nats, that is trained on."""


def step_ready(transition: Transition, node: str, vote: wire.StepReady) -> None:
    """Takes a node's vote. After the last vote the step can be committed, see `commit_if_due`."""
    if (phase := _in_hand(transition, node, vote)) is None:
        return
    state, plan = transition.state, transition.state.ledger.training.in_force
    check_vote(vote, state.ledger.description.buckets)
    check_clipped(vote, node, plan, is_open=state.ledger.is_open)
    outer_steps.check_looked(vote, node, plan, phase.look_at)
    if node in phase.votes:
        transition.log(f"ignored a second vote of {node} for step {vote.step}")
        return
    if vote.samples != (due := _due_samples(transition, plan, node)):
        reason = f"in step {vote.step} it counted {vote.samples} samples; its part in plan {plan.generation} is {due}"
        transition.find(Setback(SETTLED, node, reason, proven=Charge.SAMPLE_COUNT))
        return
    check_loss(vote, state.run.model.family)
    if problem := _diverges(vote, state):
        transition.find(_failure(state, wire.NON_FINITE, node, problem))
        return
    passed = auditing.passed_in(state, phase, node, vote)
    phase = replace(phase, votes={**phase.votes, node: vote}, passed=passed)
    transition.set_phase(phase)
    if len(phase.votes) == len(plan.nodes):
        _all_voted(transition, phase)


def _all_voted(transition: Transition, phase: Stepping) -> None:
    """Gives the step up if the votes do not agree. Otherwise it waits for its commit, and for audits, if any are drawn."""
    if (found := contradiction(transition.state, phase)) is not None:
        transition.find(found)
        return
    by = transition.now + keeping_up.commit_patience(transition.state)
    transition.set_phase(replace(phase, voted=transition.now, commit_by=by, audits=auditing.drawn(transition, phase)))


def step_failed(transition: Transition, node: str, message: wire.StepFailed) -> None:
    """A node cannot do the step, or the evaluation before a pause."""
    ledger, training, sentence = transition.state.ledger, transition.state.ledger.training, shorten(message.sentence)
    if isinstance(transition.state.phase, Pausing):
        if (message.generation, message.step - 1) == (training.generation, training.step):
            evaluation.failed(transition, node, sentence)
        return
    if _in_hand(transition, node, message) is None:
        return
    problem = message.problem if message.problem in wire.StepProblem.values() and message.problem else wire.INTERNAL
    if problem == wire.NON_FINITE and exchange(ledger, node, message.peer):
        transition.find(_got_nan(node, message.peer, sentence))
    elif problem == wire.PEER_LOST and may_lose(ledger, node, message.peer):
        transition.find(_peer_lost(node, message.peer, sentence))
    elif problem == wire.PEER_LOST:
        reason = f"it lost {shorten(repr(message.peer), 64)}, with which it exchanges nothing"
        transition.find(_failure(transition.state, wire.INTERNAL, node, reason))
    else:
        transition.find(_failure(transition.state, problem, node, sentence))


def step_overdue(transition: Transition, phase: Stepping) -> None:
    """The step has passed its deadline, though heartbeats came. Plans leave out the nodes where it stood when it was last
    interrupted, or all nodes that have not voted, until they are tested: a working node is soon back."""
    if phase.commit_by is not None:
        return  # the commit comes without more votes
    silent = set(transition.state.ledger.training.in_force.nodes) - phase.votes.keys()
    suspects = tuple(sorted(phase.stalled & silent or silent))
    reason = f"no vote from {name_some(silent)} within {phase.deadline - phase.since:g} seconds, though heartbeats came"
    unwell = tuple(Unwell(node, OVERDUE, reason) for node in suspects)
    if len(phase.stalled & silent) == 2 and may_lose(transition.state.ledger, *suspects):
        unwell = (Unwell(suspects[0], OVERDUE, reason, suspects[1]),)
    transition.find(Setback(OVERDUE, suspects[0], reason, unwell=unwell))


def _diverges(vote: wire.StepReady, state: State) -> str:
    """Why the node's vote makes a step impossible; empty: it does not. A model of the family "module" may have any finite
    loss."""
    if not is_finite(vote.squared_gradient_norm, vote.squared_change_norm, vote.loss_sum, *vote.losses):
        return "its loss or gradient norm is NaN or infinite"
    # Where tokens count alike, a node may have few samples and most of the step's tokens.
    run, batches = state.run, state.rounds.batches_each
    samples = batches * run.train.global_batch if run.train.loss_per == "token" else max(vote.samples, 1)
    loss = vote.loss_sum / samples
    if run.model.family != "module" and loss > MOST_LOSS:
        return f"its loss is {loss:.3g} nats a token, which is more than {MOST_LOSS:g}"
    return ""


def _failure(state: State, problem: wire.StepProblem, node: str, sentence: str) -> Setback:
    """The setback if a node says that it fails by itself."""
    reason = f"{sentence}{_advice(state, problem)}"
    name = wire.StepProblem.Name(problem)
    return Setback(name, node, sentence, unwell=(Unwell(node, name, reason),))


def _peer_lost(node: str, peer: str, sentence: str) -> Setback:
    """The setback if a node says that it could not reach a peer."""
    reason = f"{node} lost {peer}: {sentence}"
    return Setback(PEER_LOST, node, reason, unwell=(Unwell(node, PEER_LOST, reason, peer),))


def _got_nan(node: str, peer: str, sentence: str) -> Setback:
    """The setback if a node says that a peer has sent it NaN."""
    reason = f"{node} got a tensor from {peer} that is NaN or infinite: {sentence}"
    name = wire.StepProblem.Name(wire.NON_FINITE)
    return Setback(name, node, reason, (Doubt(Charge.HOP, (node, peer), reason, (node,)),))


def _advice(state: State, problem: wire.StepProblem) -> str:
    """How the operator can keep steps from failing in this way; empty: the run is not at fault."""
    if problem == wire.OUT_OF_MEMORY:
        return ". Lower train.micro_batch, or add nodes"
    if problem == wire.NON_FINITE:
        rate = state.ledger.optimizer.learning_rate
        return f". Lower train.learning_rate, which is {rate:g}, lengthen train.warmup_steps, or look at the data"
    return ""


def _due_samples(transition: Transition, plan: Plan, node: str) -> int:
    """The samples that the node counts in the current step: the samples of its micro-batches, if it is on the last stage of its
    island. None count in an exchange."""
    state = transition.state
    if state.rounds.exchanges(state.ledger.training.step + 1):
        return 0
    stage = plan.stages[plan.stage_of(node) or 0]
    load = stage.loads[stage.replicas.index(node)] if stage in plan.last_stages else 0
    return load * state.run.train.micro_batch


def _in_hand(transition: Transition, node: str, said: wire.StepReady | wire.StepFailed) -> Stepping | None:
    """The current step, if the node's report is about it; None: that step is not in progress, or the node has no part in it."""
    phase, training = transition.state.phase, transition.state.ledger.training
    about = (said.generation, said.step)
    takes_part = training.plan is not None and training.plan.stage_of(node) is not None
    if isinstance(phase, Stepping) and about == (training.generation, phase.step) and takes_part:
        return phase
    transition.log(f"ignored what {node} says of step {said.step} of generation {said.generation}: not in progress")
    return None
