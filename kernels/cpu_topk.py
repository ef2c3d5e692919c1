"""The codec TOPK on a CPU. See cpu.py.

A block is cut into 8 rows of 32 elements. The 8th largest of the 32 columns' maxima is a bound: at least 8 elements reach it, and
hardly more. Elements above the bound are in at most 7 columns, so there are at most 56. For the bounds of 16 blocks together, the
columns' maxima go through a network of comparisons. The loops have few branches, because the processor could not foresee these.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from dtfm.kernels.compiling import (
    CEILING,
    F32,
    FLOOR,
    HALF,
    I32,
    LEVELS_8,
    ROUND,
    U8,
    U16,
    U32,
    ZERO,
    Index,
    compiled,
    count_ones,
    f32,
    f32_in,
    lowest_one,
    u8,
    u8_in,
    u16,
    u16_in,
)

_i8, _i8_in = types.int8[::1], types.Array(types.int8, 1, "C", readonly=True)

_BLOCK, _KEPT = 256, 8
_ROWS, _COLUMNS = 8, 32
_BATCH = 16  # blocks
_I_ABS = np.int32(0x7FFFFFFF)


@compiled()
def _find_maxima(bits: I32, at: int, columns: int, maxima: I32, to: int) -> None:
    """Writes the largest magnitude of each column of the block that begins at ``at``."""
    for column in range(columns):
        largest = np.int32(0)
        for row in range(_ROWS):
            largest = max(largest, np.int32(bits[Index(at) + Index(row) * Index(_COLUMNS) + Index(column)] & _I_ABS))
        maxima[Index(to) + Index(column)] = largest


@compiled()
def _insert_four(maxima: I32, at: int, blocks: int, largest: I32) -> None:
    """Inserts the maxima of four columns into the largest ones so far. ``largest`` [_KEPT, _BATCH] is in decreasing order."""
    for block in range(blocks):
        i = Index(at) + Index(block)
        a, b = maxima[i], maxima[i + Index(_BATCH)]
        c, d = maxima[i + Index(2 * _BATCH)], maxima[i + Index(3 * _BATCH)]
        for k in range(_KEPT):
            place = Index(k * _BATCH) + Index(block)
            before = largest[place]
            with_a, a = max(before, a), min(before, a)
            with_b, b = max(with_a, b), min(with_a, b)
            with_c, c = max(with_b, c), min(with_b, c)
            largest[place], d = max(with_c, d), min(with_c, d)


@compiled()
def _find_bounds(bits: I32, first: int, count: int, rooms: tuple[I32, I32, I32], columns: int, blocks: int) -> None:
    """Sets ``largest`` to the _KEPT largest of the columns' maxima, for ``count`` blocks from ``first`` on. ``columns`` and
    ``blocks`` are _COLUMNS and _BATCH: see compiling.py."""
    by_block, by_column, largest = rooms
    for block in range(count):
        _find_maxima(bits, (first + block) * _BLOCK, columns, by_block, block * _COLUMNS)
    for column in range(_COLUMNS):
        for block in range(_BATCH):
            by_column[Index(column * _BATCH + block)] = by_block[Index(block * _COLUMNS + column)]
    largest[:] = -1
    for column in range(0, _COLUMNS, 4):
        _insert_four(by_column, column * _BATCH, blocks, largest)


@compiled()
def _above(bits: I32, at: int, bound: np.int32, ones: I32, size: int) -> np.uint32:
    """A bit for each of the ``size`` elements, as in ``ones``: whether its magnitude is above ``bound``."""
    word = np.int32(0)
    for k in range(size):
        is_above = (bits[Index(at) + Index(k)] & _I_ABS) > bound
        word = np.int32(word | (ones[Index(k)] if is_above else np.int32(0)))
    return np.uint32(word)


@compiled()
def _find_elements(bits: I32, at: int, bound: np.int32, ones: I32, size: int, words: U32, places: U32) -> int:
    """Writes the places of all elements above ``bound``, in increasing order. If these are fewer than _KEPT, the first of those
    that equal the bound are among them. Returns the number of places. ``size`` is _COLUMNS, and ``ones`` are its bits."""
    found = 0
    for row in range(_ROWS):
        words[Index(row)] = _above(bits, at + row * _COLUMNS, bound, ones, size)
        found += count_ones(words[Index(row)])
    row = 0
    while found < _KEPT:
        equal = np.uint32(_above(bits, at + row * _COLUMNS, np.int32(bound - 1), ones, size) ^ words[Index(row)])
        while equal and found < _KEPT:
            rest = np.uint32(equal & np.uint32(equal - np.uint32(1)))
            words[Index(row)] |= equal ^ rest
            equal = rest
            found += 1
        row += 1
    count = 0
    for row in range(_ROWS):
        word = words[Index(row)]
        number = count_ones(word)
        for k in range(2):  # most words have so many, or fewer
            places[Index(count + k)] = np.uint32(_COLUMNS * row) + lowest_one(word)
            word = np.uint32(word & np.uint32(word - np.uint32(1)))
        for k in range(2, number):
            places[Index(count + k)] = np.uint32(_COLUMNS * row) + lowest_one(word)
            word = np.uint32(word & np.uint32(word - np.uint32(1)))
        count += number
    return found


@compiled()
def _add_to_ranks(magnitudes: I32, i: int, size: int, ranks: I32) -> None:
    """Adds 1 to the rank of each element that comes after the ``i``-th: by its magnitude, and among equals by its place."""
    magnitude = magnitudes[Index(i)]
    for k in range(size):
        ranks[Index(k)] += np.int32(np.int32(magnitudes[Index(k)] - np.int32(k > i)) < magnitude)


@compiled()
def _drop_smallest(bits: I32, at: int, size: int, places: U32, found: int, magnitudes: I32, ranks: I32) -> None:
    """Moves the _KEPT largest of the ``found`` elements to the beginning of ``places``, in their order."""
    padded = (found + size - 1) // size * size
    for k in range(padded):
        ranks[Index(k)] = 0
    for k in range(size):
        magnitudes[Index(padded - size + k)] = -1
    for k in range(found):
        magnitudes[Index(k)] = bits[Index(at) + Index(places[Index(k)])] & _I_ABS
    for k in range(found):
        _add_to_ranks(magnitudes, k, padded, ranks)
    count = 0
    for k in range(found):
        places[Index(count)] = places[Index(k)]
        count += ranks[Index(k)] < _KEPT


@compiled(types.boolean(f32_in, _i8, u8, u16))
def encode_topk(x: F32, values: NDArray[np.int8], places: U8, scales: U16) -> bool:
    bits = x.view(np.int32)
    size, batch = min(_COLUMNS, x.size), min(_BATCH, x.size)
    by_block, by_column = np.zeros(_BATCH * _COLUMNS, np.int32), np.empty(_BATCH * _COLUMNS, np.int32)
    largest, words, found = np.empty(_KEPT * _BATCH, np.int32), np.empty(_ROWS, np.uint32), np.empty(64, np.uint32)
    magnitudes, ranks, ones = np.empty(64, np.int32), np.empty(64, np.int32), np.empty(_COLUMNS, np.int32)
    for k in range(_COLUMNS):
        ones[k] = np.int32(np.uint32(1 << k))
    for first in range(0, scales.size, _BATCH):
        count = min(_BATCH, scales.size - first)
        _find_bounds(bits, first, count, (by_block, by_column, largest), size, batch)
        for b in range(count):
            top, bound = np.uint32(largest[Index(b)]), largest[Index((_KEPT - 1) * _BATCH + b)]
            scale = np.uint32(0) if top < FLOOR else np.uint32((top + np.uint32(0xFFFF)) >> HALF)
            if scale >= CEILING:
                return False
            at = (first + b) * _BLOCK
            number = _find_elements(bits, at, bound, ones, size, words, found)
            if number > _KEPT:
                _drop_smallest(bits, at, size, found, number, magnitudes, ranks)
            scales[Index(first + b)] = scale
            factor = LEVELS_8 / np.uint32(scale << HALF).view(np.float32) if scale else ZERO
            for k in range(_KEPT):
                place, slot = found[Index(k)], Index((first + b) * _KEPT + k)
                places[slot] = place
                values[slot] = np.int8((x[Index(at) + Index(place)] * factor + ROUND) - ROUND)
    return True


@compiled(types.void(_i8_in, u8_in, u16_in, f32))
def decode_topk(values: NDArray[np.int8], places: U8, scales: U16, x: F32) -> None:
    x[:] = ZERO
    for b in range(scales.size):
        step = np.uint32(np.uint32(scales[b]) << HALF).view(np.float32) / LEVELS_8
        for slot in range(_KEPT * b, _KEPT * (b + 1)):
            i = _BLOCK * b + places[slot]
            if i < x.size:
                x[i] = np.float32(values[slot]) * step
