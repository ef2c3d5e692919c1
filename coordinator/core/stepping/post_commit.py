"""After a commit: the held-out loss, and, if training pauses, what the pause waits for.

Pausing -> Switching, with the chosen plan or with the same one again; Pausing -> the run's end after the last step.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.ending import fail, finish
from dtfm.coordinator.core.plan_adoption import adopt, again, back_before, regroup
from dtfm.coordinator.core.safekeeping.agreed_state import by_stage
from dtfm.coordinator.core.state import ATTEMPTS, Destination, Evaluation, Pausing, State, Stepping
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.standing import is_alone, party_of, weakest
from dtfm.coordinator.core.trust.verdict import Against, Unsettled, blame_for_waiting, settle, times_suspected
from dtfm.coordinator.core.validation.refusal import is_finite, malformed, name_some
from dtfm.coordinator.core.validation.votes import check_digest, check_states
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import held_out_chains
from dtfm.scheduler.model.plan import Plan

MOST_EVALUATIONS = 4
"""The number of held-out losses that are awaited at a time. If another one begins, the oldest is given up."""


def expect_evaluation(transition: Transition, step: int, plan: Plan, *, audited: bool) -> None:
    """The last nodes of the held-out micro-batches' chains report their part of the held-out loss. ``audited``: with the next
    step."""
    pending, train = transition.state.evaluations, transition.state.run.train
    if len(pending) >= MOST_EVALUATIONS:
        evaluation_lost(transition, min(pending), f"it was not done when that of step {step} began")
    held_out = held_out_chains(plan, train.evaluation_samples // train.micro_batch)
    expected = Counter(chain[-1] for chain in held_out)
    nodes = frozenset(node for chain in held_out for node in chain)
    _set_evaluation(transition, step, Evaluation(plan.generation, expected, nodes, audited=audited))


def evaluated(transition: Transition, node: str, report: wire.Evaluated) -> None:
    evaluation = transition.state.evaluations.get(report.step)
    if evaluation is None or evaluation.generation != report.generation or node not in evaluation.expected:
        transition.log(f"ignored an evaluation of step {report.step} from {node}: none is awaited")
        return
    if len(report.losses) != (due := evaluation.expected[node]):
        raise malformed("losses", len(report.losses), f"{due}, one for each of its held-out micro-batches")
    if node in evaluation.reports:
        transition.log(f"ignored a second evaluation of step {report.step} from {node}")
        return
    if not is_finite(*report.losses):
        evaluation_lost(transition, report.step, f"{node} says it is {math.fsum(report.losses)}")
        return
    evaluation = replace(evaluation, reports={**evaluation.reports, node: tuple(report.losses)})
    _set_evaluation(transition, report.step, evaluation)
    if evaluation.is_whole and not evaluation.audited:
        _announce(transition, report.step, evaluation)


def all_voted(transition: Transition, phase: Stepping) -> None:
    """What is said later of the evaluation before the step, if that is audited now, comes too late: nothing of it is drawn."""
    evaluation = transition.state.evaluations.get(phase.step - 1)
    if evaluation is not None and evaluation.audited and not evaluation.is_whole:
        silent = name_some(evaluation.expected.keys() - evaluation.reports.keys())
        evaluation_lost(transition, phase.step - 1, f"{silent} voted on step {phase.step} without reporting its part")


def audited(transition: Transition, phase: Stepping) -> None:
    """The step is committed, so that nothing wrong was found in what was drawn of the evaluation before it: now that counts. Had
    the step been interrupted, the next plan would have forgotten it."""
    evaluation = transition.state.evaluations.get(phase.step - 1)
    if evaluation is not None and evaluation.audited:
        _announce(transition, phase.step - 1, evaluation)


def _announce(transition: Transition, step: int, evaluation: Evaluation) -> None:
    described, micro_batch = transition.state.ledger.described, transition.state.run.train.micro_batch
    assert described is not None
    losses = [loss for report in evaluation.reports.values() for loss in report]
    loss = math.fsum(losses) / len(losses)
    transition.emit(ev.Evaluated(step, loss, len(losses) * micro_batch, described.unigram_entropy))
    _forget_evaluation(transition, step)


def evaluation_lost(transition: Transition, step: int, why: str) -> None:
    """The run goes on without this held-out loss."""
    transition.log(f"no held-out loss after step {step}: {why}")
    _forget_evaluation(transition, step)


def applied(transition: Transition, node: str, message: wire.Applied) -> None:
    """A node has applied the commit before the pause."""
    phase, plan = transition.state.phase, transition.state.ledger.training.plan
    if not isinstance(phase, Pausing) or plan is None or node not in plan.nodes:
        return
    if (message.generation, message.step) == (plan.generation, transition.state.ledger.training.step):
        check_digest(message.state_digest)
        described = transition.state.ledger.described
        assert described is not None
        told = check_states(message.states, described.buckets)
        applied = {**phase.applied, node: message.state_digest}
        transition.enter(replace(phase, applied=applied, states={**phase.states, node: told}))


def node_left(transition: Transition, node: str) -> None:
    """The node's part of the held-out loss will not come."""
    for step, evaluation in transition.state.evaluations.items():
        if node in evaluation.expected.keys() - evaluation.reports.keys():
            evaluation_lost(transition, step, f"{node} left before its part was evaluated")


def end_pause(transition: Transition) -> None:
    """Once the pause waits for nothing, the run ends, or goes on with the plan that is chosen. A pause for a node that wants to
    leave ends when it has left (leaving.py)."""
    phase, ledger = transition.state.phase, transition.state.ledger
    if transition.state.stopped or not isinstance(phase, Pausing) or awaits(transition.state, phase):
        return
    assert ledger.training.plan is not None
    for index, stage in enumerate(ledger.training.plan.stages):
        digests = {node: phase.applied[node].hex() for node in stage.replicas if node in phase.applied}
        if (verdict := settle(ledger, digests, operator.eq)) is not None:
            _settled(transition, verdict, index, digests)
            return
    by_stage(transition, _told(phase))
    if (
        ledger.training.step >= transition.state.run.train.steps
        and ledger.training.step not in ledger.copies.checkpoints
    ):
        again(transition, "the last checkpoint failed")
    elif ledger.training.step >= transition.state.run.train.steps:
        finish(
            transition,
            f"all {ledger.training.step} steps are trained; the checkpoint is {ledger.copies.checkpoints[ledger.training.step]}",
        )
    elif transition.state.planner.chosen is not None:
        adopt(transition, transition.state.planner.chosen, "")
    elif not phase.for_leaver:
        again(transition, "a node of the plan that was chosen has left")


def awaits(state: State, phase: Pausing) -> str:
    """What the pause still waits for; empty: nothing."""
    ledger = state.ledger
    assert ledger.training.plan is not None
    silent = sorted((set(ledger.training.plan.nodes) & state.members.sessions.keys()) - phase.applied.keys())
    last = ledger.training.step == state.run.train.steps
    if last and state.safekeeping.snapshot(Destination.CHECKPOINT, ledger.training.step) is not None:
        return "the last checkpoint"
    if phase.for_leaver and state.safekeeping.snapshot(Destination.CHECKPOINT, ledger.training.step) is not None:
        return "the checkpoint"
    if ledger.training.step in state.evaluations:
        return "the held-out loss"
    return f"the confirmation of {', '.join(silent)}" if silent else ""


def overdue(transition: Transition, phase: Pausing) -> None:
    """The pause exceeded its deadline, though heartbeats came. A held-out loss is given up, as it takes whole chains of nodes,
    and a checkpoint by `snapshot.end_overdue`. Otherwise what was to be done is done again. Each node confirms by itself, so
    after ATTEMPTS it is settled against one that never did. If nobody ever did, the run has failed; but strangers, who could all
    be one, go one after the other. Whoever writes its part of the last checkpoint at the last moment leaves the coordinator no
    less time for the manifest."""
    state, ledger = transition.state, transition.state.ledger
    assert ledger.training.plan is not None
    step = ledger.training.step
    if step in state.evaluations:
        evaluation_lost(transition, step, f"it did not come within {state.patience:g} seconds")
    tally = state.safekeeping.snapshot(Destination.CHECKPOINT, step)
    if tally is not None and (
        transition.now > tally.due if tally.writers else transition.now <= tally.heard + state.patience
    ):
        return
    late = {node for node in ledger.training.plan.nodes if node in state.members.sessions and node not in phase.applied}
    awaited = awaits(transition.state, phase)
    reason = f"step {step} is trained, but {awaited} did not come within {state.patience:g} seconds"
    if not awaited:
        return
    if not late:
        fail(transition, reason)
        return
    suspects = tuple(sorted(late))
    accused = weakest(ledger, late)
    transition.emit(ev.PlanFailed(ledger.training.generation, accused, reason, silent=True, suspects=suspects))
    party = party_of(ledger)
    everybody = {party(node) for node in ledger.training.plan.nodes}
    match blame_for_waiting(transition.state.ledger):
        case Against(members, others) if not ledger.is_open and (
            is_alone(ledger) or (len(everybody) > 1 and {party(node) for node in (*members, *others)} == everybody)
        ):
            fail(transition, f"{ATTEMPTS} attempts in a row: {reason}")
        case Against() as verdict:
            times = times_suspected(transition.state.ledger, verdict.members[0])
            quarantine(transition, verdict, Charge.STALLED, f"{times} attempts waited for it; the last: {reason}")
        case Unsettled():
            again(transition, reason)


def _told(phase: Pausing) -> Mapping[str, tuple[bytes, Mapping[int, str]]]:
    """By node, the digest of its state, and those of its buckets."""
    states = phase.states
    return {
        node: (whole, {bucket: said.digest for bucket, said in states.get(node, {}).items()})
        for node, whole in phase.applied.items()
    }


def _settled(transition: Transition, verdict: Against, stage: int, digests: Mapping[str, str]) -> None:
    """After a commit the replicas of a stage (digests by node) hold different state."""
    ledger = transition.state.ledger
    transition.emit(ev.DigestMismatch(ledger.training.step + 1, ledger.training.generation, stage, dict(digests)))
    reason = f"after step {ledger.training.step} its state differs from that of the other replicas of stage {stage}"
    quarantine(transition, replace(verdict, undecided=True), Charge.DIGEST, reason)  # as in a step, see votes.py
    regroup(transition, f"{name_some(verdict.members)}: {reason}")
    if verdict.undecided:
        back_before(transition, ledger.training.step, reason)


def _set_evaluation(transition: Transition, step: int, evaluation: Evaluation) -> None:
    transition.state = replace(transition.state, evaluations={**transition.state.evaluations, step: evaluation})


def _forget_evaluation(transition: Transition, step: int) -> None:
    evaluations = {s: evaluation for s, evaluation in transition.state.evaluations.items() if s != step}
    transition.state = replace(transition.state, evaluations=evaluations)
