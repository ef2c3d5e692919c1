"""How far the results of two honest devices may be from each other.

The audited work is done again from the same inputs, which are compared by digest. Devices of one kind mostly come to the same
bits. Others add up in another order: in bf16, which has 8 bits, what a few layers compute then differs by one or two hundredths
(and up to five are allowed), in fp32 with TF32 by less than a thousandth.

That is the most that is ever allowed, and what holds at first. Once enough audits between two kinds of devices have shown how far
apart these are (log/rounding.py), it is MARGIN times that, and FLOORS beside: of devices that always came to the same bits, one
may be started again with another number of threads or another library.

A codec that rounds to steps turns a small difference d (relative to the tensor's size) into a larger one, since a value near the
middle between two steps may fall to either: the share d / step of the values does, by a step each, so that the error is
sqrt(d * step). ``_STEPS`` has the steps relative to the root mean square of a block whose largest value is four times that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtfm.coordinator.log.rounding import Seen, typical

PRECISIONS = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 5e-2}
"""By train.precision, the largest relative error ||a - b|| / ||b|| of tensors that were not compressed."""

FLOORS = {
    "fp64": {"activations": 1e-9, "gradients": 1e-9, "addends": 1e-9, "losses": 1e-9},
    "fp32": {"activations": 1e-4, "gradients": 1e-4, "addends": 1e-4, "losses": 1e-4},
    "bf16": {"activations": 1e-2, "gradients": 2e-2, "addends": 4e-2, "losses": 5e-3},
}
"""By train.precision and what is compared, the relative error that is allowed however equal devices were until now. More than
twice what tests/bench/rounding.py has measured between other threads, libraries and processors, as referees go by half of it
(auditing/views.py)."""

MARGIN = 4.0
"""How many times what honest devices typically see of each other is allowed: that varies with the weights and the data."""

_STEPS = {"off": 0.0, "raw16": 2.0**-8, "i8b256": 4 / 127, "i4b64": 4 / 7, "i4h64": 4 / 7}


@dataclass(frozen=True, slots=True)
class Limit:
    """The relative errors that are allowed: ``most`` in any case; ``usual`` is at most that. ``learned``: from audits."""

    most: float
    usual: float
    learned: bool = False


def limit(what: str, precision: str, codec: str, rows: Sequence[Seen]) -> Limit:
    """For ``what`` is compared under this codec; ``rows``: what audits have shown of it between devices of these kinds."""
    most, seen = tolerance(precision, codec), typical(rows)
    if seen is None:
        return Limit(most, most)
    usual = _rougher(FLOORS.get(precision, FLOORS["bf16"])[what], codec) + MARGIN * seen
    return Limit(most, min(most, usual), learned=True)


def tolerance(precision: str, codec: str = "off") -> float:
    """The most for tensors under this codec (a name as in the run file; of an unknown one the roughest is assumed). A bias of 5 %
    is found in fp32 under each codec, and in bf16 only by what is learned."""
    return _rougher(PRECISIONS.get(precision, max(PRECISIONS.values())), codec)


def _rougher(apart: float, codec: str) -> float:
    """What a codec makes of tensors that are so far apart."""
    return apart + math.sqrt(apart * _STEPS.get(codec, max(_STEPS.values())))
