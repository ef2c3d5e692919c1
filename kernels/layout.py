"""What encoded bytes look like: the codecs, their blocks and their scales.

A quantising codec cuts a tensor's float32 elements (row-major, the last block filled up with zeros) into blocks.
Encoded, all blocks' values come first, then all blocks' scales:

- A scale is the block's largest magnitude as a bfloat16 rounded up, so that no value exceeds it. A block whose largest
  magnitude is under the codec's ``floor`` has scale 0 and values 0: what lies below could meet denormals, which GPUs
  flush to zero and CPUs do not. A block that would need a scale of the codec's ``ceiling`` or more (infinite, say) makes
  the codec refuse the tensor.
- A value is ``rint(element * (levels / scale))``, halves to even, and decodes to ``value * (scale / levels)``; every
  operation is rounded to float32 by itself, divisions are true divisions.
- Values have 8 or 4 bits, two's complement. Of 4 bits, byte i of a block of B elements holds element i in its low
  half and element i + B/2 in its high half.

``rotated`` codecs quantise y = H(s * x) instead of x: H is the Walsh-Hadamard transform of a block without normalisation,
in place, strides from B/2 down to 1, each pair (a, b) becoming (a + b, a - b); s flips the sign of the elements whose bit
in SIGNS is 1. Elements of magnitude under 2^-100 count as zero. Decoding applies H again, then s / B. A single large element
is so spread over its block instead of deciding the scale alone.

``kept`` codecs leave out all but so many elements of each block: they keep those of the largest magnitudes, of equal ones
the first, in the order in which they stand. After all blocks' values comes where in its block each of them stands (a byte
each), then the scales. What was left out decodes to 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BF16_INFINITY = 0x7F80
"""Bits of bfloat16's +inf; those of NaNs and of what is negative are larger."""

SIGNS = 0x9E3779B97F4A7C15
"""Bit j (the lowest is 0) is 1 where element j of a rotated block changes its sign: the golden ratio's first 64 bits."""


class Codec(enum.IntEnum):
    """How a tensor's elements become bytes. The numbers are on the wire."""

    OFF = 0
    """The elements as they are, little-endian."""
    RAW16 = 1
    """bfloat16, rounded to nearest, halves to even; NaN stays NaN, what exceeds bfloat16's range becomes infinite."""
    I8B256 = 2
    """8 bits in blocks of 256: 8.06 bits per element."""
    I4B64 = 3
    """4 bits in blocks of 64: 4.25 bits per element."""
    I4H64 = 4
    """As I4B64, rotated."""
    TOPK = 5
    """The 8 largest of each block of 256, in 8 bits: 0.56 bits per element. See ``sparse``."""

    @property
    def sparse(self) -> bool:
        """Leaves elements out: for the gradients that replicas exchange, whose sender makes up for it in the next steps
        (feedback.py). Not for activations, nor for the gradients that flow back to them: these have no next step."""
        return self is Codec.TOPK


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantising codec's numbers.

    ``block``: elements per block; ``bits`` per value; ``levels``: the largest value; ``floor``: bits of the smallest
    float32 magnitude that is quantised, whose upper half is the smallest scale but 0; ``ceiling``: bits of the smallest
    bfloat16 that is too large for a scale; ``kept``: how many elements of a block have a value, None for all.
    """

    block: int
    bits: int
    levels: int
    floor: int
    ceiling: int = BF16_INFINITY
    rotated: bool = False
    kept: int | None = None

    @property
    def value_bytes(self) -> int:
        """Bytes of one block's values, and of where they stand."""
        return self.block * self.bits // 8 if self.kept is None else self.kept * (self.bits // 8 + 1)

    def count(self, elements: int) -> int:
        """Blocks that ``elements`` elements fill."""
        return -(-elements // self.block)


def _power_of_two(exponent: int) -> int:
    """Bits of 2^exponent as a float32."""
    return (127 + exponent) << 23


SMALLEST = _power_of_two(-100)
BLOCKS = {
    Codec.I8B256: Blocks(256, bits=8, levels=127, floor=SMALLEST),
    Codec.I4B64: Blocks(64, bits=4, levels=7, floor=SMALLEST),
    # Rotating back adds 64 of the values that the scale bounds, and then multiplies by 1/64: the first must not overflow,
    # the second leave no denormal.
    Codec.I4H64: Blocks(64, bits=4, levels=7, floor=_power_of_two(-94), ceiling=_power_of_two(121) >> 16, rotated=True),
    Codec.TOPK: Blocks(256, bits=8, levels=127, floor=SMALLEST, kept=8),
}


def check(codec: Codec, encoded: NDArray[np.uint8], elements: int) -> None:
    """Raises ValueError where ``encoded``, of the length that ``elements`` elements have under ``codec``, holds a scale, or
    places, that no encoder writes."""
    blocks = BLOCKS.get(codec)
    if blocks is None:
        return
    count = blocks.count(elements)
    places, scales = np.split(encoded, [count * blocks.value_bytes])
    check_scales(scales.view(np.uint16), blocks)
    if blocks.kept is not None:
        check_places(places[count * blocks.kept :].reshape(count, blocks.kept))


def check_scales(scales: NDArray[np.uint16], blocks: Blocks) -> None:
    """Raises ValueError for a scale that no encoder writes: NaN, negative, too large, or so small that devices differ."""
    wrong = scales[(scales >= blocks.ceiling) | ((scales != 0) & (scales < blocks.floor >> 16))]
    if wrong.size:
        raise ValueError(
            f"{wrong.size} of {scales.size} blocks have a scale that no encoder writes, the first with bits "
            f"{int(wrong[0]):#06x}: the sender does not follow this version's layout"
        )


def check_places(places: NDArray[np.uint8]) -> None:
    """Raises ValueError unless each row of ``places``, shape (blocks, kept), rises: otherwise one element had two values."""
    wrong = np.flatnonzero(np.any(places[:, 1:] <= places[:, :-1], axis=1))
    if wrong.size:
        raise ValueError(
            f"{wrong.size} of {len(places)} blocks have places that do not rise, the first {places[wrong[0]].tolist()}: "
            "the sender does not follow this version's layout"
        )
