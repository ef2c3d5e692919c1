"""Whether the votes of a step agree: with each other, and with the plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtfm.coordinator.core.state import State, Stepping
from dtfm.coordinator.core.trust.apart import outweighed
from dtfm.coordinator.core.trust.audits import Passed
from dtfm.coordinator.core.trust.passed import differing, lacks, sent_several_sums
from dtfm.coordinator.core.trust.verdict import Against, against_one, settle
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import DigestMismatch
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.scheduler.model.plan import Plan

NORM_TOLERANCE = 1e-4
"""Replicas of a stage hold the same reduced gradient, but devices of different kinds may sum its squares in another order."""

LOSS_TOLERANCE = 1e-4
"""The losses of a node's micro-batches add up to the one that it votes, but for rounding."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """``mismatch``: replicas hold different state, and if the ``verdict`` is undecided nobody knows whose is right."""

    verdict: Against
    charge: Charge
    reason: str
    mismatch: DigestMismatch | None = None


@dataclass(frozen=True, slots=True)
class Dispute:
    """These pairs do not say the same of what passed between them, and it is not known which of the two is right."""

    pairs: tuple[Pair, ...]
    reason: str


def contradiction(state: State, phase: Stepping) -> Contradiction | Dispute | None:
    """What is wrong with the votes of a step for which all have voted; None: nothing.

    Replicas that differ from a majority may not be at fault: one that reduces gradients can send another result to each.
    """
    ledger, plan = state.ledger, state.ledger.training.plan
    assert plan is not None
    for index, stage in enumerate(plan.stages):
        digests = {node: phase.votes[node].state_digest.hex() for node in stage.replicas}
        if (verdict := settle(ledger, digests, operator.eq)) is not None:
            mismatch = DigestMismatch(phase.step, plan.generation, index, digests)
            reason = f"before step {phase.step} its state differs from that of the other replicas of stage {index}"
            return Contradiction(verdict, Charge.DIGEST, reason, mismatch)
    if phase.passed and (found := _of_hops(state, plan, phase)) is not None:
        return found  # it says whose fault it is that norms differ
    for index, stage in enumerate(plan.stages):
        norms = {node: phase.votes[node].squared_gradient_norm for node in stage.replicas}
        if (verdict := settle(ledger, norms, _same_norm)) is not None:
            reason = f"in step {phase.step} its gradient differs from that of the other replicas of stage {index}"
            return Contradiction(replace(verdict, undecided=True), Charge.GRADIENT_NORM, reason)
    return _of_losses(plan, phase, state.run.train.micro_batch) if phase.passed and not phase.only_evaluation else None


def _of_hops(state: State, plan: Plan, phase: Stepping) -> Contradiction | Dispute | None:
    step, passed = phase.step, phase.passed
    for node in plan.nodes:
        if what := lacks(plan, node, passed[node], phase.held_out, trained=not phase.only_evaluation):
            return Contradiction(Against((node,)), Charge.HOP, f"in step {step} it does not say that it {what}")
    if not (pairs := differing(passed)):
        return _of_sums(plan, step, passed)
    sender, receiver, what = pairs[0]
    reason = f"in step {step}, {sender} and {receiver} do not say the same of {what} between them"
    contradicts: dict[str, set[str]] = {}
    for one, other, _ in pairs:
        contradicts.setdefault(one, set()).add(other)
        contradicts.setdefault(other, set()).add(one)
    for accused in sorted(contradicts, key=lambda node: (-len(contradicts[node]), node)):
        if outweighed(state, accused, contradicts[accused]):
            verdict = Against((accused,), tuple(sorted(contradicts[accused])), undecided=True)
            return Contradiction(verdict, Charge.HOP, reason)
    disputed = {pair_of(one, other) for one, other, _ in pairs}
    if disputed <= state.ledger.reach.broken:  # no plan does without them: the step must not be tried so for ever
        return Contradiction(against_one(state.ledger, pairs[0][:2]), Charge.HOP, reason)
    return Dispute(tuple(sorted(disputed)), reason)


def _of_sums(plan: Plan, step: int, passed: Mapping[str, Passed]) -> Contradiction | None:
    """Both ends of each hop say the same, so that who has sent several sums says so itself. Without this, those whom it gave
    another one would differ from the others in the next step."""
    several = {node: what for node in plan.nodes if (what := sent_several_sums(passed[node]))}
    if not several:
        return None
    node, what = next(iter(several.items()))
    reason = f"in step {step} it did not send the same sum of {what} to all other replicas"
    return Contradiction(Against((node,)), Charge.HOP, reason)


def _of_losses(plan: Plan, phase: Stepping, micro_batch: int) -> Contradiction | None:
    for node, load in zip(plan.stages[-1].replicas, plan.stages[-1].loads, strict=True):
        vote = phase.votes[node]
        told = math.fsum(vote.losses) * micro_batch
        if len(vote.losses) != load or abs(told - vote.loss_sum) > LOSS_TOLERANCE * max(1.0, abs(vote.loss_sum)):
            reason = (
                f"in step {phase.step} it votes a loss of {vote.loss_sum:g}, and {len(vote.losses)} losses of micro-batches "
                f"that make {told:g}"
            )
            return Contradiction(Against((node,)), Charge.HOP, reason)
    return None


def _same_norm(one: float, other: float) -> bool:
    return abs(one - other) <= NORM_TOLERANCE * max(one, other)
