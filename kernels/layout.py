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
among equals, in their original order. After all blocks' values come the kept elements' places in their blocks, then the scales.
The other elements decode to 0. TOPK's places have one byte each.

TOP64 divides a block into GROUP groups of GROUP elements, and never keeps a magnitude below 2^-100. A block's bytes are:

- 64 slots of one byte, one for each kept element: its place in its group (6 bits), then a bit that is set if it is large, and one
  that is set if it is negative. If fewer elements are kept, the last slots are 0.
- 16 bytes for the ends of the groups (the code of Elias and Fano). From the lowest bit of the first byte on, there is a 0 for
  each kept element of a group, and then a 1.
- two scales. Small elements decode to the first one with their sign, large ones to the second. They are bfloat16, rounded to
  nearest, halves to even. An element is large if its magnitude exceeds the mean of the kept magnitudes. A scale is the mean of
  its elements' magnitudes. If all are small, or all large, both scales are the same. If no element is kept, both are 0.

The mean of n magnitudes is ``sum / (n / 64)``, where the sum is that of the magnitudes' 64th parts at their slots, with 0 in all
other slots: slot i is increased by slot i + 32 for all i below 32, then by slot i + 16 for all i below 16, and so on.
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
    TOP64 = 6
    """The 64 largest elements of each block of 4,096, in 2 bits: 0.16 bits per element. See ``sparse``."""

    @property
    def sparse(self) -> bool:
        """Whether the codec leaves elements out. In exchanges the sender adds the left-out elements to its next changes
        (codec.py). A sum of several sparse tensors is not sparse: so each node sends its own to all others."""
        return self in (Codec.TOPK, Codec.TOP64)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The parameters of a quantising codec."""

    block: int
    """Elements per block."""
    bits: int
    """Bits per value."""
    levels: int
    """The largest value."""
    value_bytes: int
    """Bytes of one block's values and places."""
    kept: int | None = None
    """The number of elements of a block that have a value. None: all."""
    scales: int = 1
    """The number of a block's scales."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.value_bytes + 2 * self.scales

    def count(self, elements: int) -> int:
        """Number of blocks that ``elements`` elements fill."""
        return -(-elements // self.block)


SMALLEST = (127 - 100) << 23
"""Bits of the smallest float32 magnitude that is quantised, 2^-100; its upper half is the smallest scale except 0."""
GROUP = 64
"""The number of groups of a block of TOP64, and of elements in a group."""
BLOCKS = {
    Codec.I8B256: Blocks(256, bits=8, levels=127, value_bytes=256),
    Codec.I4B64: Blocks(64, bits=4, levels=7, value_bytes=32),
    Codec.TOPK: Blocks(256, bits=8, levels=127, value_bytes=16, kept=8),
    Codec.TOP64: Blocks(GROUP * GROUP, bits=2, levels=1, value_bytes=80, kept=64, scales=2),
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
            f"{wrong.size} of {scales.size} scales have bits that no encoder writes, the first {int(wrong[0]):#06x}: {_WHY}"
        )
    if codec is Codec.TOPK:
        _check_order(values[count * 8 :].reshape(count, 8), np.ones((count, 8), np.bool_))
    if codec is Codec.TOP64:
        _check_top64(values, scales.reshape(count, 2), elements)


_WHY = "the sender does not follow this version's layout"


def _check_top64(values: NDArray[np.uint8], scales: NDArray[np.uint16], elements: int) -> None:
    count = len(scales)
    slots, ends = values[: 64 * count].reshape(count, 64), values[64 * count :].reshape(count, 16)
    bits = np.unpackbits(ends, axis=1, bitorder="little")
    numbers = np.count_nonzero(bits, axis=1)
    if (wrong := np.flatnonzero(numbers != GROUP)).size:
        raise ValueError(
            f"{wrong.size} of {count} blocks have a number of groups that no encoder writes, the first {numbers[wrong[0]]} "
            f"instead of {GROUP}: {_WHY}"
        )
    groups = np.nonzero(bits == 0)[1].reshape(count, 64) - np.arange(64)  # of each slot: the number of ends before it
    places, is_kept = groups * GROUP + slots % GROUP, groups < GROUP
    _check_order(places, is_kept)
    if np.any(slots[~is_kept]) or np.any((scales == 0) == is_kept[:, :1]):
        raise ValueError(
            f"a slot without an element, or a scale without elements, has bits that no encoder writes: {_WHY}"
        )
    if count and np.any(is_kept[-1] & (places[-1] >= elements - (count - 1) * GROUP * GROUP)):
        raise ValueError(f"there are places behind the last of {elements} elements that no encoder writes: {_WHY}")


def _check_order(places: NDArray[np.integer], is_kept: NDArray[np.bool_]) -> None:
    """Raises ValueError unless the places [blocks, slots] of kept elements increase: otherwise an element would have two
    values."""
    unordered = np.flatnonzero(np.any((places[:, 1:] <= places[:, :-1]) & is_kept[:, 1:], axis=1))
    if unordered.size:
        raise ValueError(
            f"{unordered.size} of {len(places)} blocks have places that do not increase, the first "
            f"{places[unordered[0]].tolist()}: {_WHY}"
        )
