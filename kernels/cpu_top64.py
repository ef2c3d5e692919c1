"""The codec TOP64 on a CPU. See cpu.py.

A block is cut into 8 rows of 512 elements. The 64th largest of the columns' maxima, or a number a little below it, is a bound:
at least 64 elements reach it, and hardly more. Only columns that reach the bound can contain such elements. The loops have few
branches, because the processor could not foresee these.
"""

from __future__ import annotations

import numpy as np
from numba import types

from dtfm.kernels.compiling import (
    CEILING,
    F32,
    HALF,
    I32,
    U8,
    U16,
    U32,
    ZERO,
    Index,
    compiled,
    f32,
    f32_in,
    u8,
    u8_in,
    u16,
    u16_in,
)
from dtfm.kernels.layout import GROUP, SMALLEST

_BLOCK, _KEPT = GROUP * GROUP, 64
_ROWS, _COLUMNS = 8, GROUP * GROUP // 8
_PADDING = 32  # elements, a few vectors: so that a loop over found elements has no rest
_I_ABS = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_SIXTY_FOURTH = np.float32(1 / 64)


@compiled()
def _find_maxima(bits: I32, at: int, width: int, maxima: I32) -> None:
    """Sets ``maxima`` to each column's largest magnitude. The columns' rows begin at ``at`` and have ``width`` elements."""
    for k in range(width):
        largest = np.int32(0)
        for row in range(_ROWS):
            largest = max(largest, np.int32(bits[Index(at) + Index(row) * Index(width) + Index(k)] & _I_ABS))
        maxima[Index(k)] = largest


@compiled()
def _fold(maxima: I32, width: int, kept: int, folded: I32) -> None:
    """Sets ``folded`` to the largest of each ``kept``-th of ``maxima``."""
    for k in range(kept):
        folded[Index(k)] = maxima[Index(k)]
    for at in range(kept, width, kept):
        for k in range(kept):
            folded[Index(k)] = max(folded[Index(k)], maxima[Index(at) + Index(k)])


@compiled()
def _count(magnitudes: I32, size: int, bound: np.int32) -> np.int32:
    """The number of ``magnitudes`` that reach ``bound``."""
    count = np.int32(0)
    for k in range(size):
        count = np.int32(count + np.int32(magnitudes[Index(k)] >= bound))
    return count


@compiled()
def _bound(magnitudes: I32, size: int, kept: int, most: int, low: int, high: int) -> np.int32:
    """A bound that ``kept`` to ``most`` magnitudes reach. If there is none, the largest that ``kept`` reach. At least ``kept``
    reach ``low``, and fewer reach ``high``."""
    if _count(magnitudes, size, np.int32(low)) <= most:
        return np.int32(low)
    while high - low > 1:
        middle = (low + high) // 2
        count = _count(magnitudes, size, np.int32(middle))
        if count < kept:
            high = middle
        else:
            low = middle
            if count <= most:
                break
    return np.int32(low)


@compiled()
def _find_columns(maxima: I32, width: int, bound: np.int32, columns: U32) -> int:
    """Writes the columns that reach ``bound``, and returns their number."""
    count = 0
    for k in range(width):
        columns[Index(count)] = np.uint32(k)
        count += maxima[Index(k)] >= bound
    return count


@compiled()
def _find_elements(
    bits: I32, at: int, width: int, bound: np.int32, columns: U32, count: int, places: U32, magnitudes: I32
) -> int:
    """Writes the elements of the first ``count`` of ``columns`` that reach ``bound``, in order. Returns their number."""
    found = 0
    for row in range(_ROWS):
        for c in range(count):
            place = np.uint32(np.uint32(row * width) + columns[Index(c)])
            magnitude = np.int32(bits[Index(at) + Index(place)] & _I_ABS)
            places[Index(found)] = place
            magnitudes[Index(found)] = magnitude
            found += magnitude >= bound  # type: ignore[assignment]
    return found


@compiled()
def _drop_smallest(places: U32, magnitudes: I32, found: int, kept: int, low: int, high: int) -> int:
    """Keeps ``kept`` of the ``found`` elements, the largest, and the first among equals."""
    for k in range(_PADDING):
        magnitudes[Index(found + k)] = np.int32(-1)
    size = (found + _PADDING - 1) // _PADDING * _PADDING
    bound = _bound(magnitudes, size, kept, kept, low, high)
    equals = kept - _count(magnitudes, size, np.int32(bound + 1))  # of those that equal the bound
    count = 0
    for k in range(found):
        magnitude = magnitudes[Index(k)]
        is_equal = magnitude == bound
        places[Index(count)] = places[Index(k)]
        count += (magnitude > bound) | (is_equal & (equals > 0))
        equals -= is_equal
    return kept


@compiled()
def _find_largest(
    bits: I32, at: int, block: int, kept: int, smallest: int, rooms: tuple[I32, I32, U32, I32], places: U32
) -> tuple[int, np.int32]:
    """Writes the places of the ``kept`` largest elements of a block, the first among equals, in increasing order. Elements whose
    magnitude is below ``smallest`` (its bits) are left out. ``rooms``: see _rooms.

    Returns the number of places, and the bits of the largest magnitude. If that is not finite, no places are written."""
    maxima, folded, columns, magnitudes = rooms
    width = block // _ROWS
    _find_maxima(bits, at, width, maxima)
    _fold(maxima, width, kept, folded)
    low, top = folded[0], folded[0]
    for k in range(kept):
        low, top = min(low, folded[Index(k)]), max(top, folded[Index(k)])
    if top >= _INFINITE:
        return 0, top
    bound = np.int32(smallest)
    if low >= bound:
        bound = _bound(maxima, width, kept, kept + kept // 8, low, top + 1)
    found = _find_elements(
        bits, at, width, bound, columns, _find_columns(maxima, width, bound, columns), places, magnitudes
    )
    if found > kept:
        found = _drop_smallest(places, magnitudes, found, kept, bound, top + 1)  # type: ignore[arg-type]
    return found, top


@compiled()
def _rooms(block: int, kept: int) -> tuple[I32, I32, U32, I32]:
    """The columns' maxima, these folded to ``kept``, columns, and found elements' magnitudes. Loops write one element further
    than they find."""
    width = block // _ROWS
    maxima, columns = np.empty(width, np.int32), np.empty(width + 1, np.uint32)
    return maxima, np.empty(kept, np.int32), columns, np.empty(block + _PADDING, np.int32)


@compiled()
def _add_up(rest: F32) -> np.float32:
    """The sum of the 64 numbers, in the order that layout.py says. Changes them."""
    half = _KEPT // 2
    while half:
        for k in range(half):
            rest[Index(k)] += rest[Index(k) + Index(half)]
        half //= 2
    return rest[0]  # type: ignore[no-any-return]


@compiled()
def _rounded(x: np.float32) -> np.uint32:
    """Bits of x as a bfloat16, rounded to nearest, halves to even."""
    bits = np.float32(x).view(np.uint32)
    return np.uint32((bits + np.uint32(0x7FFF) + ((bits >> HALF) & np.uint32(1))) >> HALF)


@compiled()
def _mean(sixty_fourths: np.float32, count: int) -> np.float32:
    """The mean of ``count`` numbers, of whose 64th parts this is the sum."""
    return sixty_fourths / np.float32(np.float32(count) * _SIXTY_FOURTH)


@compiled(types.boolean(f32_in, u8, u8, u16))
def encode_top64(x: F32, slots: U8, ends: U8, scales: U16) -> bool:
    bits = x.view(np.int32)
    block, kept = min(_BLOCK, x.size), _KEPT
    groups = block // GROUP
    rooms, found, counts = _rooms(block, kept), np.empty(block + 1, np.uint32), np.empty(groups, np.int32)
    magnitudes, part = np.empty(kept, np.float32), np.empty(kept, np.float32)
    ends[:] = 0
    for b in range(scales.size // 2):
        count, top = _find_largest(bits, b * block, block, kept, SMALLEST, rooms, found)
        if top >= _INFINITE:
            return False
        magnitudes[:] = ZERO
        for k in range(count):
            magnitudes[k] = np.float32(abs(x[Index(b * block) + Index(found[k])]))
        for k in range(kept):
            part[k] = magnitudes[k] * _SIXTY_FOURTH
        mean = _mean(_add_up(part), count) if count else ZERO
        above = 0
        for k in range(kept):
            is_large = magnitudes[k] > mean
            above += is_large
            part[k] = magnitudes[k] * _SIXTY_FOURTH if is_large else ZERO
        large = _rounded(_mean(_add_up(part), above)) if above else np.uint32(0)
        for k in range(kept):
            part[k] = ZERO if magnitudes[k] > mean else magnitudes[k] * _SIXTY_FOURTH
        small = _rounded(_mean(_add_up(part), count - above)) if count > above else large
        large = large if above else small
        if max(small, large) >= CEILING:
            return False
        scales[2 * b], scales[2 * b + 1] = small, large

        counts[:] = 0
        for k in range(kept):
            slots[kept * b + k] = 0
        for k in range(count):
            place = found[k]
            negative = np.uint32(x[Index(b * block) + Index(place)] < ZERO)
            is_large = np.uint32(magnitudes[k] > mean)
            slots[kept * b + k] = (place % np.uint32(GROUP)) | (is_large << np.uint32(6)) | (negative << np.uint32(7))
            counts[place // np.uint32(GROUP)] += 1
        at = 128 * b
        for group in range(groups):
            at += counts[group]
            ends[at // 8] |= np.uint8(1 << (at % 8))
            at += 1
    return True


@compiled(types.void(u8_in, u8_in, u16_in, f32))
def decode_top64(slots: U8, ends: U8, scales: U16, x: F32) -> None:
    x[:] = ZERO
    for b in range(scales.size // 2):
        small = np.uint32(np.uint32(scales[2 * b]) << HALF).view(np.float32)
        large = np.uint32(np.uint32(scales[2 * b + 1]) << HALF).view(np.float32)
        at, slot, first = 128 * b, _KEPT * b, _BLOCK * b
        while first < _BLOCK * (b + 1):  # check() has found as many ends as there are groups
            if ends[at // 8] >> (at % 8) & 1:
                first += GROUP
            else:
                i = first + (slots[slot] & 63)
                if i < x.size:
                    value = large if slots[slot] & 64 else small
                    x[i] = -value if slots[slot] & 128 else value
                slot += 1
            at += 1
