"""The layout of encoded bytes: codecs, blocks and scales.

A quantising codec divides a tensor's float32 elements (row-major, the last block padded with zeros) into blocks. The encoded
bytes are the values of all blocks, then the scales of all blocks:

- A scale is the block's largest magnitude as a bfloat16, rounded up so that no value exceeds it. A block whose largest
  magnitude is below 2^-100 has scale 0 and values 0. Smaller numbers could lead to denormals, which GPUs flush to zero and CPUs
  do not. A block that would need an infinite scale makes the codec refuse the tensor.
- A value is ``rint(element * (levels / scale))``, halves to even, and decodes to ``value * (scale / levels)``. Every operation
  is rounded to float32 separately, and divisions are true divisions.
- Values have 8 or 4 bits, in two's complement. With 4 bits, byte i of a block of B elements has element i in its low half and
  element i + B/2 in its high half.

``kept`` codecs keep only that number of elements of each block. They keep the elements with the largest magnitudes, the first
among equals, in their original order. After all blocks' values come the kept elements' places in their blocks (one byte each),
then the scales. The other elements decode to 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BF16_INFINITY = 0x7F80
"""Bits of bfloat16's +inf. The bits of NaNs and of negative numbers are larger."""


class Codec(enum.IntEnum):
    """How a tensor's elements become bytes. Frames carry the numbers: never reuse a number (4 was a codec's)."""

    OFF = 0
    """The elements unchanged, little-endian."""
    RAW16 = 1
    """bfloat16, rounded to nearest, halves to even. NaNs stay NaNs; a number beyond bfloat16's range becomes infinite."""
    I8B256 = 2
    """8 bits in blocks of 256: 8.06 bits per element."""
    I4B64 = 3
    """4 bits in blocks of 64: 4.25 bits per element."""
    TOPK = 5
    """The 8 largest elements of each block of 256, in 8 bits: 0.56 bits per element. See ``sparse``."""

    @property
    def sparse(self) -> bool:
        """Whether the codec leaves elements out. In exchanges the sender adds the left-out elements to its next changes
        (codec.py). A sum of several sparse tensors is not sparse: so each node sends its own to all others."""
        return self is Codec.TOPK


@dataclass(frozen=True, slots=True)
class Blocks:
    """The parameters of a quantising codec."""

    block: int
    """Elements per block."""
    bits: int
    """Bits per value."""
    levels: int
    """The largest value."""
    kept: int | None = None
    """The number of elements of a block that have a value. None: all."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one block's values and places."""
        return self.block * self.bits // 8 if self.kept is None else self.kept * (self.bits // 8 + 1)

    def count(self, elements: int) -> int:
        """Number of blocks that ``elements`` elements fill."""
        return -(-elements // self.block)


SMALLEST = (127 - 100) << 23
"""Bits of the smallest float32 magnitude that is quantised, 2^-100; its upper half is the smallest scale except 0."""
BLOCKS = {
    Codec.I8B256: Blocks(256, bits=8, levels=127),
    Codec.I4B64: Blocks(64, bits=4, levels=7),
    Codec.TOPK: Blocks(256, bits=8, levels=127, kept=8),
}


def check(codec: Codec, encoded: NDArray[np.uint8], elements: int) -> None:
    """Raises ValueError when ``encoded`` contains scales or places that no encoder writes. Its length must fit ``elements``
    elements under ``codec``."""
    blocks = BLOCKS.get(codec)
    if blocks is None:
        return
    count = blocks.count(elements)
    values, last = np.split(encoded, [count * blocks.value_bytes])
    scales = last.view(np.uint16)
    # A NaN, negative, too large, or so small that devices would differ.
    wrong = scales[(scales >= BF16_INFINITY) | ((scales != 0) & (scales < SMALLEST >> 16))]
    if wrong.size:
        raise ValueError(
            f"{wrong.size} of {scales.size} blocks have a scale that no encoder writes, the first with bits "
            f"{int(wrong[0]):#06x}: the sender does not follow this version's layout"
        )
    if blocks.kept is not None:
        places = values[count * blocks.kept :].reshape(count, blocks.kept)
        # They increase: otherwise an element would have two values.
        unordered = np.flatnonzero(np.any(places[:, 1:] <= places[:, :-1], axis=1))
        if unordered.size:
            raise ValueError(
                f"{unordered.size} of {count} blocks have places that do not increase, the first "
                f"{places[unordered[0]].tolist()}: the sender does not follow this version's layout"
            )
