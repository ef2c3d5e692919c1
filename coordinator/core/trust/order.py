"""What an auditor is asked: which work to do again, and the digests of what went in and came out."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from dtfm.coordinator.core.audits import Passed
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.trust.draw import Drawn
from dtfm.coordinator.core.trust.passed import added_up
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan


def order_for(state: State, phase: Stepping, plan: Plan, drawn: Drawn, random: Random) -> wire.Audit:
    """With the digests that votes have. ``random`` chooses the bucket of a whole share, and the sum."""
    node, stage = drawn.node, plan.stage_of(drawn.node)
    assert stage is not None
    sent, received, vote = phase.passed[node].sent, phase.passed[node].received, phase.votes[node]
    last = stage == len(plan.stages) - 1
    losses = dict(zip(micro_batches_of(plan)[node], vote.losses, strict=True)) if last else {}
    order = wire.Audit(generation=plan.generation, step=phase.step, node=node)
    for number in drawn.micro_batches:
        chain = chains(plan)[number]
        previous, after = chain[stage - 1] if stage else "", "" if last else chain[stage + 1]
        order.micro_batches.add(
            number=number,
            previous=previous,
            next=after,
            activation_in=received.get((previous, node, Kind.ACTIVATION, number, 0), b""),
            activation_out=sent.get((node, after, Kind.ACTIVATION, number, 0), b""),
            gradient_in=received.get((after, node, Kind.GRADIENT, number, 0), b""),
            gradient_out=sent.get((node, previous, Kind.GRADIENT, number, 0), b""),
            loss=losses.get(number, 0.0),
        )
    if drawn.whole:
        party = state.ledger.party
        kept = {each for each, its in phase.votes.items() if its.kept or party(each) == party(node)}
        summed = added_up(phase.passed[node], kept) if not vote.clipped else {}
        _order_addends(order, phase.passed[node], summed, random)
    return order


def _order_addends(
    order: wire.Audit,
    passed: Passed,
    summed: Mapping[tuple[int, int], Mapping[str, bytes]],
    random: Random,
) -> None:
    """Of one bucket, what it sent to be added up, and one of the pieces that it added up
    itself."""
    pieces = {(hop[3], hop[4]): digest for hop, digest in passed.sent.items() if hop[2] == Kind.REDUCE}
    if not (buckets := sorted({bucket for bucket, _ in (*pieces, *summed)})):
        return
    bucket = order.bucket = random.choice(buckets)
    for (index, piece), digest in sorted(pieces.items()):
        if index == bucket:
            order.pieces.add(piece=piece, digest=digest)
    if owned := sorted(piece for index, piece in summed if index == bucket):
        piece = random.choice(owned)
        addends = [wire.Audit.Addend(node=each, digest=its) for each, its in sorted(summed[bucket, piece].items())]
        order.sums.add(piece=piece, addends=addends)


def needed(order: wire.Audit) -> frozenset[str]:
    """Whose tensors the auditor may ask for."""
    around = {each.previous for each in order.micro_batches}
    around |= {each.next for each in order.micro_batches}
    addends = {addend.node for summed in order.sums for addend in summed.addends}
    return frozenset({order.node, *around, *addends} - {""})
