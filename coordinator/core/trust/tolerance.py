"""How far the results of two honest devices may be from each other.

The audited work is done again from the same inputs, which are compared by digest. Devices of one kind mostly come to the same
bits. Others add up in another order: in bf16, which has 8 bits, what a few layers compute then differs by one or two hundredths
(and up to five are allowed), in fp32 with TF32 by less than a thousandth.

A codec that rounds to steps turns a small difference d (relative to the tensor's size) into a larger one, since a value near the
middle between two steps may fall to either: the share d / step of the values does, by a step each, so that the error is
sqrt(d * step). ``_STEPS`` has the steps relative to the root mean square of a block whose largest value is four times that.
"""

from __future__ import annotations

import math

PRECISIONS = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 5e-2}
"""By train.precision, the largest relative error ||a - b|| / ||b|| of tensors that were not compressed."""

_STEPS = {"off": 0.0, "raw16": 2.0**-8, "i8b256": 4 / 127, "i4b64": 4 / 7, "i4h64": 4 / 7}


def tolerance(precision: str, codec: str = "off") -> float:
    """For tensors under this codec (a name as in the run file; of an unknown one the roughest is assumed). A bias of 5 % is found
    in fp32 under each codec, and not in bf16."""
    least = PRECISIONS.get(precision, max(PRECISIONS.values()))
    return least + math.sqrt(least * _STEPS.get(codec, max(_STEPS.values())))
