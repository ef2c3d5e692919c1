"""How long an auditor may need to fetch what it compares, by the links as they were measured."""

from __future__ import annotations

from collections import Counter

from dtfm.coordinator.core.state import State
from dtfm.protos import control_pb2 as wire


def fetch_seconds(state: State, order: wire.Audit, by: str) -> float:
    """The longest that one node needs to hand ``by`` what the order names, if nothing is compressed and no digest is equal, as
    between devices that differ. A link that nobody has measured takes no time here."""
    rows = state.ledger.reach.links
    return max(
        (
            size / link.bandwidth
            for source, size in _bytes_from(state, order).items()
            if (link := rows.get(source, {}).get(by)) is not None and link.bandwidth > 0
        ),
        default=0.0,
    )


def _bytes_from(state: State, order: wire.Audit) -> Counter[str]:
    plan, described = state.ledger.training.plan, state.ledger.described
    assert plan is not None
    assert described is not None
    layers = described.workload.layers
    stage = plan.stages[plan.stage_of(order.node) or 0]
    first, past_last = stage.layers
    entering, leaving = layers[max(first - 1, 0)].activation_bytes, layers[past_last - 1].activation_bytes
    sizes: Counter[str] = Counter()
    for each in order.micro_batches:
        for neighbour, size in ((each.previous, entering), (each.next, leaving)):
            if neighbour:
                sizes[neighbour] += round(size)
                sizes[order.node] += round(size)
    if order.HasField("bucket"):
        parameters = [layer.parameter_bytes for layer in layers]
        bucket = parameters[order.bucket] if order.bucket < len(parameters) else max(parameters)
        sizes[order.node] += round(bucket)
        for summed in order.sums:
            for addend in summed.addends:
                sizes[addend.node] += round(bucket / len(stage.replicas))
    sizes.pop("", None)
    return sizes
