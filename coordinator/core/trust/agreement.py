"""Whether the votes of a step agree: with each other, and with the plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeVar

from dtfm.coordinator.core.findings import Setback, contradicting
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.trust.passed import differing, lacks, sent_several_sums
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import DigestMismatch
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.coordinator.log.steps import SETTLED
from dtfm.protos.control_pb2 import Applied, StepReady
from dtfm.scheduler.model.plan import Plan

NORM_TOLERANCE = 1e-4
"""Replicas of a stage hold the same reduced gradient, but devices of different kinds may sum its squares in another order."""

LOSS_TOLERANCE = 1e-4
"""The losses of a node's micro-batches must add up to the loss that it votes. This much may be rounding."""

MOST_OPPONENTS = 8
"""The number of nodes that are named against a node whose view differs from theirs."""

View = TypeVar("View")


def contradiction(state: State, phase: Stepping) -> Setback | None:
    """The contradiction in the votes of a step that all nodes have voted for; None: there is no contradiction."""
    ledger, plan = state.ledger, state.ledger.training.in_force
    digests = {node: vote.state_digest for node, vote in phase.votes.items()}
    if found := stage_differs(ledger, digests) or islands_differ(ledger, phase.votes):
        return found
    exchanges = state.rounds.exchanges(phase.step)
    if phase.passed and (found := _of_hops(plan, phase, exchanges)) is not None:
        return found  # it says which node is at fault that norms differ
    for index, stage in enumerate(plan.stages):
        norms = {node: phase.votes[node].squared_gradient_norm for node in stage.replicas}
        if pairs := dissent(ledger, norms, _same_norm):
            reason = f"in step {phase.step} their gradients of stage {index} differ"
            return Setback(SETTLED, pairs[0][0], reason, contradicting(Charge.GRADIENT_NORM, pairs, reason))
    return _of_losses(plan, phase, state.run.train.micro_batch) if phase.passed and not exchanges else None


def stage_differs(ledger: Ledger, digests: Mapping[str, bytes]) -> Setback | None:
    """The finding if replicas of a stage say that they hold different state after the last committed step; None: they agree.
    ``digests``: by node that has said what it holds."""
    for index, stage in enumerate(ledger.training.in_force.stages):
        said = {node: digests[node].hex() for node in stage.replicas if node in digests}
        if (found := state_differs(ledger, said, index, f"stage {index}")) is not None:
            return found
    return None


def islands_differ(ledger: Ledger, said: Mapping[str, StepReady | Applied]) -> Setback | None:
    """The finding if nodes that train a layer, in any island, say different digests of the state that islands share after an
    exchange; None: they agree. A node in ``said`` without such a digest differs from nodes with a digest. Parameters that are
    tied between layers are not compared."""
    shared = {(node, each.bucket): each.shared.hex() for node, message in said.items() for each in message.states}
    for layer in range(len(ledger.holders) if shared else 0):
        stages = [stage for stage in ledger.training.in_force.stages if layer in range(*stage.layers)]
        digests = {node: shared.get((node, layer), "") for stage in stages for node in stage.replicas if node in said}
        if found := state_differs(ledger, digests, ledger.training.in_force.stages.index(stages[0]), f"layer {layer}"):
            return found
    return None


def state_differs(
    ledger: Ledger, digests: Mapping[str, str], stage: int, of: str, *, went_on: bool = True
) -> Setback | None:
    """The finding if nodes hold different state after the last committed step; None: they hold the same. If training ``went_on``
    with the difference, nobody knows since when there is one."""
    step, pairs = ledger.training.step, dissent(ledger, digests)
    if not pairs:
        return None
    reason = f"after step {step} their state of {of} differs"
    doubts = contradicting(Charge.DIGEST, pairs, reason)
    since = max(step - 1, 0) if went_on and step else None
    mismatch = DigestMismatch(step + 1, ledger.training.generation, stage, dict(digests))
    return Setback(SETTLED, pairs[0][0], reason, doubts, since=since, unless_settled=True, mismatch=mismatch)


def dissent(ledger: Ledger, views: Mapping[str, View], agree: Callable[[View, View], bool] = operator.eq) -> list[Pair]:
    """The pairs of nodes that contradict each other, where all ``views`` should be the same.

    The view of most parties is compared with each other view; such a node contradicts some of that majority. Empty: all views are
    the same, or all agree with one of them. ``agree`` may allow for rounding, so two of these may still not agree with each
    other."""
    first = next(iter(views.values()), None)
    if first is None or all(agree(first, other) for other in views.values()):
        return []

    def supporters(node: str) -> list[str]:
        return [other for other in sorted(views) if agree(views[node], views[other])]

    most = max((supporters(node) for node in sorted(views)), key=lambda nodes: len(set(map(ledger.party, nodes))))
    against = list({ledger.party(node): node for node in most}.values())[:MOST_OPPONENTS]
    return sorted({pair_of(node, other) for node in views if node not in most for other in against if other != node})


def _of_hops(plan: Plan, phase: Stepping, exchanges: bool) -> Setback | None:
    step, passed = phase.step, phase.passed
    for node in plan.nodes:
        if what := lacks(plan, node, passed[node], exchanges=exchanges):
            return _proven(node, f"in step {step} it does not say that it {what}")
    if pairs := differing(passed):
        sender, receiver, what = pairs[0]
        reason = f"in step {step}, {sender} and {receiver} do not say the same of {what} between them"
        disputed = sorted({pair_of(one, other) for one, other, _ in pairs})
        return Setback(SETTLED, sender, reason, contradicting(Charge.HOP, disputed, reason))
    # Both ends of each hop say the same, so a node that sent several sums says so itself. Without this check, the receivers of
    # another sum would differ from the other replicas in the next step.
    for node in plan.nodes:
        if what := sent_several_sums(passed[node]):
            return _proven(node, f"in step {step} it did not send the same sum of {what} to all other replicas")
    return None


def _of_losses(plan: Plan, phase: Stepping, micro_batch: int) -> Setback | None:
    for node, load in (each for stage in plan.last_stages for each in zip(stage.replicas, stage.loads, strict=True)):
        vote = phase.votes[node]
        told = math.fsum(vote.losses) * micro_batch
        if len(vote.losses) != load or abs(told - vote.loss_sum) > LOSS_TOLERANCE * max(1.0, abs(vote.loss_sum)):
            return _proven(
                node,
                f"in step {phase.step} it votes a loss of {vote.loss_sum:g}, and {len(vote.losses)} losses of micro-batches that "
                f"make {told:g}",
            )
    return None


def _proven(node: str, reason: str) -> Setback:
    return Setback(SETTLED, node, reason, proven=Charge.HOP)


def _same_norm(one: float, other: float) -> bool:
    return abs(one - other) <= NORM_TOLERANCE * max(one, other)
