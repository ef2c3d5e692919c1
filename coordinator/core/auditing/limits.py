"""How far an auditor's result may be from the audited one, by the kinds of the two devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.trust.codecs import codec_in_use
from dtfm.coordinator.core.trust.tolerance import Limit, limit, tolerance
from dtfm.coordinator.log.rounding import kind_of, sort_of
from dtfm.protos import control_pb2 as wire


def limits(state: State, order: wire.Audit, by: str) -> Mapping[str, Limit]:
    """By what is to be compared, the relative errors that count as rounding if ``by`` is the auditor."""
    kinds, rounding = device_kinds(state, order.node, by), state.ledger.trust.rounding
    is_last = not any(each.next for each in order.micro_batches)

    def of(what: str, codec: str) -> Limit:
        rows = rounding.get(sort_of(what, codec, kinds), ()) if len(kinds) == 2 else ()
        return limit(what, state.run.train.precision, codec, rows)

    rounded_as = {"evaluations": "losses" if is_last else "activations"}  # which are computed in the same way
    return {what: of(rounded_as.get(what, what), codec) for what, codec in codecs_compared(state, order).items()}


def exceeds(answer: wire.Audited, most: Mapping[str, float]) -> bool:
    return any(getattr(answer, what) > error for what, error in most.items())


def device_kinds(state: State, *nodes: str) -> tuple[str, ...]:
    """The kinds of the nodes' devices. Nodes that have left are passed over."""
    members = state.ledger.members
    return tuple(kind_of(members[node].device) for node in nodes if node in members)


def codecs_compared(state: State, order: wire.Audit) -> Mapping[str, str]:
    """By what is to be compared, the codec under which it was sent; of several the roughest."""
    codecs, plan = state.ledger.training.codecs.get(order.node, {}), state.ledger.training.plan
    assert plan is not None

    def of(tensors: str, receivers: Collection[str]) -> str:
        used = {codec_in_use(state.run.network, codecs.get(to, {}), tensors) for to in receivers}
        return max(sorted(used), key=lambda codec: tolerance(state.run.train.precision, codec))

    compared = {}
    if order.evaluation:
        onward = {each.next for each in order.micro_batches if each.next}
        return {"evaluations": of("activations", onward) if onward else "off"}
    if onward := {each.next for each in order.micro_batches if each.next}:
        compared["activations"] = of("activations", onward)
    else:
        compared["losses"] = "off"
    if back := {each.previous for each in order.micro_batches if each.previous}:
        compared["gradients"] = of("gradients", back)
    if order.HasField("bucket"):
        compared["addends"] = of("reduction", [node for node in plan.nodes if node != order.node])
    return compared
