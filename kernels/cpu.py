"""The codecs on a CPU: one pass over memory per call, compiled by Numba, equal to tests/kernels/reference.py bit for bit.

The compiled code is kept beside this file, or elsewhere (dtfm/compiled_code.py), so only a machine's first import compiles, for
a few seconds. The cache contains layout.py's numbers: touch this file after changing them. The loops release the GIL, write into
the caller's arrays, and round every operation to float32 separately: Numba fuses no multiply-adds without ``fastmath``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from dtfm.compiled_code import find_room
from dtfm.kernels.layout import BF16_INFINITY, BLOCKS, SMALLEST, Codec, check

find_room()

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U8 = NDArray[np.uint8]
_njit: Any = numba.njit  # its types do not know no_cfunc_wrapper
_F = TypeVar("_F", bound=Callable[..., Any])

_f32, _u16, _u8 = types.float32[::1], types.uint16[::1], types.uint8[::1]
_f32_in, _u16_in, _u8_in = (types.Array(a.dtype, 1, "C", readonly=True) for a in (_f32, _u16, _u8))
_i8_rows, _u8_rows = types.int8[:, ::1], types.uint8[:, ::1]
_i8_rows_in, _u8_rows_in = (types.Array(a.dtype, 2, "C", readonly=True) for a in (_i8_rows, _u8_rows))


def compiled(signature: Any = None) -> Callable[[_F], _F]:
    compiler: Callable[[_F], _F] = _njit(signature, nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True)
    return compiler


_ABS = np.uint32(0x7FFFFFFF)
_HALF = np.uint32(16)
_ZERO = np.float32(0)
_CEILING = np.uint32(BF16_INFINITY)
_LEVELS_8, _LEVELS_4 = np.float32(BLOCKS[Codec.I8B256].levels), np.float32(BLOCKS[Codec.I4B64].levels)
_FLOOR = np.uint32(SMALLEST)
# Adding and subtracting 1.5 * 2^23 rounds small numbers to integers, halves to even, and unlike rint it vectorises.
_ROUND = np.float32(12582912)
_Index = np.uintp


def encode(codec: Codec, elements: F32, out: U8) -> bool:
    """Encodes 1-D contiguous ``elements`` into ``out``, which has exactly the encoded length.

    Returns False, with ``out`` undefined, when the codec is a quantising one and ``elements`` contains a NaN, an
    infinity or a value too large for its scales.
    """
    if codec is Codec.RAW16:
        _encode_raw16(elements, out.view(np.uint16))
        return True
    layout = BLOCKS[codec]
    values, scales = _parts(out, layout.count(elements.size))
    whole = elements.size // layout.block

    def encode_blocks(x: F32, first: int, past: int) -> bool:
        if layout.kept is None:
            part = values[first * layout.value_bytes : past * layout.value_bytes]
            return bool(_ENCODE[codec](x, part, scales[first:past]))
        kept, places = values.reshape(2, scales.size, layout.kept)[:, first:past]
        return bool(_encode_topk(x, layout.block, kept.view(np.int8), places, scales[first:past]))

    if not encode_blocks(elements[: whole * layout.block], 0, whole):
        return False
    if whole == scales.size:
        return True
    last = np.zeros(layout.block, np.float32)
    last[: elements.size - whole * layout.block] = elements[whole * layout.block :]
    return encode_blocks(last, whole, scales.size)


def decode(codec: Codec, encoded: U8, out: F32) -> None:
    """Decodes ``encoded``, which has exactly the encoded length, into 1-D contiguous ``out``.

    Raises ValueError, with ``out`` undefined, for scales or places that no encoder writes.
    """
    if codec is Codec.RAW16:
        _decode_raw16(np.require(encoded.view(np.uint16), requirements="A"), out)
        return
    check(codec, encoded, out.size)
    layout = BLOCKS[codec]
    values, scales = _parts(encoded, layout.count(out.size))
    scales = np.require(scales, requirements="A")
    if layout.kept is not None:
        kept, places = values.reshape(2, scales.size, layout.kept)
        _decode_topk(kept.view(np.int8), places, scales, layout.block, out)
        return
    kernel = _DECODE[codec]
    whole = out.size // layout.block
    kernel(values[: whole * layout.value_bytes], scales[:whole], out[: whole * layout.block])
    if whole < scales.size:
        last = np.empty(layout.block, np.float32)
        kernel(values[whole * layout.value_bytes :], scales[whole:], last)
        out[whole * layout.block :] = last[: out.size - whole * layout.block]


def _parts(encoded: U8, blocks: int) -> tuple[U8, U16]:
    """The values and the scales of ``encoded``."""
    split = encoded.size - 2 * blocks
    return encoded[:split], encoded[split:].view(np.uint16)


@compiled(types.void(_f32_in, _u16))
def _encode_raw16(x: F32, out: U16) -> None:
    bits = x.view(np.uint32)
    for i in range(x.size):
        u = bits[i]
        rounded = (u + np.uint32(0x7FFF) + ((u >> _HALF) & np.uint32(1))) >> _HALF
        quiet = (u >> _HALF) | np.uint32(0x40)
        out[i] = np.uint16(quiet if (u & _ABS) > np.uint32(0x7F800000) else rounded)


@compiled(types.void(_u16_in, _f32))
def _decode_raw16(halves: U16, out: F32) -> None:
    bits = out.view(np.uint32)
    for i in range(out.size):
        bits[i] = np.uint32(halves[i]) << _HALF


# Below, `at` is a block's first index in an array. Two habits keep the loops vectorised, which doubles their speed. Sizes that
# could be constants are arguments computed as min(32, x.size), which is always 32: the compiler would unroll short loops of
# a known length instead of vectorising them. Indices are unsigned: signed ones need a check for counting from the end.


@compiled()
def _scale(x: F32, at: int, size: int) -> np.uint32:
    """Bits of a block's scale; at least _CEILING when the block cannot have any."""
    bits = x.view(np.uint32)
    magnitude = np.uint32(0)
    for k in range(size):
        magnitude = max(magnitude, np.uint32(bits[_Index(at) + _Index(k)] & _ABS))
    return np.uint32(0) if magnitude < _FLOOR else np.uint32((magnitude + np.uint32(0xFFFF)) >> _HALF)


@compiled()
def _quantise_i8(x: F32, at: int, size: int, factor: np.float32, values: NDArray[np.int8]) -> None:
    for k in range(size):
        i = _Index(at) + _Index(k)
        values[i] = np.int8((x[i] * factor + _ROUND) - _ROUND)


@compiled()
def _quantise_i4(x: F32, at: int, half: int, factor: np.float32, values: U8, values_at: int) -> None:
    for k in range(half):
        i = _Index(at) + _Index(k)
        low = np.int32((x[i] * factor + _ROUND) - _ROUND)
        high = np.int32((x[i + _Index(half)] * factor + _ROUND) - _ROUND)
        values[_Index(values_at) + _Index(k)] = np.uint8((low & np.int32(15)) | (high << np.int32(4)))


@compiled()
def _restore_i4(values: U8, values_at: int, half: int, step: np.float32, x: F32, at: int) -> None:
    for k in range(half):
        i = _Index(at) + _Index(k)
        both = np.int32(values[_Index(values_at) + _Index(k)])
        x[i] = np.float32(((both & np.int32(15)) ^ np.int32(8)) - np.int32(8)) * step
        x[i + _Index(half)] = np.float32(((both >> np.int32(4)) ^ np.int32(8)) - np.int32(8)) * step


@compiled(types.boolean(_f32_in, _u8, _u16))
def _encode_i8(x: F32, values: U8, scales: U16) -> bool:
    for b in range(scales.size):
        scale = _scale(x, 256 * b, 256)
        if scale >= _CEILING:
            return False
        scales[b] = scale
        factor = _LEVELS_8 / np.uint32(scale << _HALF).view(np.float32) if scale else _ZERO
        _quantise_i8(x, 256 * b, 256, factor, values.view(np.int8))
    return True


@compiled(types.void(_u8_in, _u16_in, _f32))
def _decode_i8(values: U8, scales: U16, x: F32) -> None:
    signed = values.view(np.int8)
    for b in range(scales.size):
        step = np.uint32(np.uint32(scales[b]) << _HALF).view(np.float32) / _LEVELS_8
        for i in range(256 * b, 256 * b + 256):
            x[_Index(i)] = np.float32(signed[_Index(i)]) * step


@compiled(types.boolean(_f32_in, _u8, _u16))
def _encode_i4(x: F32, values: U8, scales: U16) -> bool:
    half = min(32, x.size)
    for b in range(scales.size):
        scale = _scale(x, 64 * b, 2 * half)
        if scale >= _CEILING:
            return False
        scales[b] = scale
        factor = _LEVELS_4 / np.uint32(scale << _HALF).view(np.float32) if scale else _ZERO
        _quantise_i4(x, 64 * b, half, factor, values, 32 * b)
    return True


@compiled(types.void(_u8_in, _u16_in, _f32))
def _decode_i4(values: U8, scales: U16, x: F32) -> None:
    half = min(32, x.size)
    for b in range(scales.size):
        step = np.uint32(np.uint32(scales[b]) << _HALF).view(np.float32) / _LEVELS_4
        _restore_i4(values, 32 * b, half, step, x, 64 * b)


@compiled()
def _insert(rising: NDArray[np.uint64], slot: int, key: np.uint64) -> None:
    """Inserts ``key`` into the sorted array ``rising``, replacing the key at ``slot``, which belongs there or further up."""
    while slot + 1 < rising.size and rising[_Index(slot + 1)] < key:
        rising[_Index(slot)] = rising[_Index(slot + 1)]
        slot += 1
    rising[_Index(slot)] = key


@compiled(types.boolean(_f32_in, types.intp, _i8_rows, _u8_rows, _u16))
def _encode_topk(x: F32, block: int, values: NDArray[np.int8], places: U8, scales: U16) -> bool:
    bits = x.view(np.uint32)
    kept = values.shape[1]
    # Keys have the magnitude in their upper bits and the place in the lower, so that all differ. Places count from the end, so
    # that the first of equal magnitudes is the largest key.
    keys, chosen = np.empty(kept, np.uint64), np.empty(kept, np.uint64)
    shift, last = np.uint64(8), np.uint64(block - 1)
    for b in range(scales.size):
        first = b * block
        for k in range(kept):
            magnitude = np.uint64(bits[first + k] & _ABS)
            _insert(keys, kept - 1 - k, (magnitude << shift) | (last - np.uint64(k)))
        smallest = np.uint32(keys[0] >> shift)
        for k in range(kept, block):
            magnitude = bits[_Index(first) + _Index(k)] & _ABS
            if magnitude > smallest:
                _insert(keys, 0, (np.uint64(magnitude) << shift) | (last - np.uint64(k)))
                smallest = np.uint32(keys[0] >> shift)
        top = np.uint32(keys[kept - 1] >> shift)
        scale = np.uint32(0) if top < _FLOOR else np.uint32((top + np.uint32(0xFFFF)) >> _HALF)
        if scale >= _CEILING:
            return False
        scales[b] = scale
        factor = _LEVELS_8 / np.uint32(scale << _HALF).view(np.float32) if scale else _ZERO
        for k in range(kept):
            _insert(chosen, kept - 1 - k, last - (keys[k] & last))
        for k in range(kept):
            place = chosen[k]
            places[b, k] = place
            values[b, k] = np.int8((x[_Index(first) + _Index(place)] * factor + _ROUND) - _ROUND)
    return True


@compiled(types.void(_i8_rows_in, _u8_rows_in, _u16_in, types.intp, _f32))
def _decode_topk(values: NDArray[np.int8], places: U8, scales: U16, block: int, x: F32) -> None:
    x[:] = _ZERO
    for b in range(scales.size):
        step = np.uint32(np.uint32(scales[b]) << _HALF).view(np.float32) / _LEVELS_8
        for k in range(values.shape[1]):
            i = b * block + places[b, k]
            if i < x.size:
                x[i] = np.float32(values[b, k]) * step


_ENCODE = {Codec.I8B256: _encode_i8, Codec.I4B64: _encode_i4}
_DECODE = {Codec.I8B256: _decode_i8, Codec.I4B64: _decode_i4}
