"""How far an auditor's results may be from a node's, so that rounding explains it.

The audited work is repeated from the same inputs, which are compared by digest. Devices of one kind mostly get the same bits.
Devices of other kinds add up in another order. In bf16, which has 8 bits, the results of a few layers then differ by one or two
hundredths; up to five hundredths are allowed. In fp32 they differ by some millionths; up to a thousandth is allowed. That is too
little if one of two devices uses TF32.

A codec that rounds to steps makes a small difference d (relative to the tensor's size) larger, since a value near the middle
between two steps may be rounded to either. The share d / step of the values differs by a step each, so the error is
sqrt(d * step). At most it is step / sqrt(6), the error of two values that are rounded independently. ``_STEPS`` has the steps,
relative to the root mean square of a block whose largest value is four times that mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from dtfm.coordinator.config.codecs import codec_in_use
from dtfm.coordinator.core.state.state import State
from dtfm.protos import control_pb2 as wire

PRECISIONS = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 5e-2}
"""By train.precision, the largest relative error ||a - b|| / ||b|| of tensors that were not compressed."""

OF_ROUNDS = {"fp64": 1e-6, "fp32": 5e-2, "bf16": 0.6}
"""The same for the change that an island makes in a round. Each step enlarges the differences of earlier steps. After 100 steps,
honest devices were seen to differ by 0.8 % in fp32, and by 31 % in bf16 (docs/measurements.md)."""

_STEPS = {"off": 0.0, "raw16": 2.0**-8, "i8b256": 4 / 127, "i4b64": 4 / 7}


def tolerance(precision: str, codec: str = "off", by_precision: Mapping[str, float] = PRECISIONS) -> float:
    """The largest relative error of tensors under this codec. ``codec`` is a name as in the run file; for an unknown name the
    roughest is assumed. A bias of 5 % is found in fp32 under each codec, and in bf16 under none."""
    apart = by_precision.get(precision, max(by_precision.values()))
    step = _STEPS.get(codec, max(_STEPS.values()))
    return apart + min(math.sqrt(apart * step), step / math.sqrt(6))


def limits(state: State, order: wire.Audit) -> Mapping[str, float]:
    """By compared quantity, the largest relative error that counts as rounding."""
    compared, apart = _codecs_compared(state, order), OF_ROUNDS if order.trained else PRECISIONS
    return {what: tolerance(state.run.train.precision, codec, apart) for what, codec in compared.items()}


def _codecs_compared(state: State, order: wire.Audit) -> Mapping[str, str]:
    """By compared quantity, the codec that it was sent with; if there are several, the roughest."""
    codecs, plan = state.ledger.training.codecs.get(order.node, {}), state.ledger.training.in_force
    if not order.micro_batches:
        return {"addends": state.run.network.exchange}

    def of(tensors: str, receivers: Collection[str]) -> str:
        used = {codec_in_use(state.run.network, codecs.get(to, {}), tensors) for to in receivers}
        return max(sorted(used), key=lambda codec: tolerance(state.run.train.precision, codec))

    compared = {}
    if onward := {each.next for each in order.micro_batches if each.next}:
        compared["activations"] = of("activations", onward)
    else:
        compared["losses"] = "off"
    if back := {each.previous for each in order.micro_batches if each.previous}:
        compared["gradients"] = of("gradients", back)
    if order.HasField("bucket"):
        compared["addends"] = of("reduction", [node for node in plan.nodes if node != order.node])
    return compared
