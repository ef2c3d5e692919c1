"""The codecs on a CPU: one pass over memory per call, compiled by Numba (compiling.py), equal to tests/kernels/reference.py bit
for bit. The sparse codecs' loops: cpu_topk.py and cpu_top64.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from dtfm.kernels.compiling import (
    ABS,
    CEILING,
    F32,
    FLOOR,
    HALF,
    LEVELS_8,
    ROUND,
    U8,
    U16,
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
from dtfm.kernels.cpu_top64 import decode_top64, encode_top64
from dtfm.kernels.cpu_topk import decode_topk, encode_topk
from dtfm.kernels.layout import BLOCKS, Codec, check

_LEVELS_4 = np.float32(BLOCKS[Codec.I4B64].levels)


def encode(codec: Codec, elements: F32, out: U8) -> bool:
    """Encodes 1-D contiguous ``elements`` into ``out``, which has exactly the encoded length.

    Returns False, with ``out`` undefined, when the codec is a quantising one and ``elements`` contains a NaN, an
    infinity or a value too large for its scales.
    """
    if codec is Codec.RAW16:
        _encode_raw16(elements, out.view(np.uint16))
        return True
    block = BLOCKS[codec].block
    parts, count = _parts(codec, out, elements.size), BLOCKS[codec].count(elements.size)
    whole = elements.size // block
    if not _ENCODE[codec](elements[: whole * block], *_blocks(parts, count, 0, whole)):
        return False
    if whole == count:
        return True
    last = np.zeros(block, np.float32)
    last[: elements.size - whole * block] = elements[whole * block :]
    return bool(_ENCODE[codec](last, *_blocks(parts, count, whole, count)))


def decode(codec: Codec, encoded: U8, out: F32) -> None:
    """Decodes ``encoded``, which has exactly the encoded length, into 1-D contiguous ``out``.

    Raises ValueError, with ``out`` undefined, for scales or places that no encoder writes.
    """
    if codec is Codec.RAW16:
        _decode_raw16(np.require(encoded.view(np.uint16), requirements="A"), out)
        return
    check(codec, encoded, out.size)
    block, count = BLOCKS[codec].block, BLOCKS[codec].count(out.size)
    *others, scales = _parts(codec, encoded, out.size)
    parts = (*others, np.require(scales, requirements="A"))
    kernel = _DECODE[codec]
    if codec.sparse:
        kernel(*parts, out)
        return
    whole = out.size // block
    kernel(*_blocks(parts, count, 0, whole), out[: whole * block])
    if whole < count:
        last = np.empty(block, np.float32)
        kernel(*_blocks(parts, count, whole, count), last)
        out[whole * block :] = last[: out.size - whole * block]


def _parts(codec: Codec, encoded: U8, elements: int) -> tuple[NDArray[Any], ...]:
    """The parts of ``encoded`` in their order, as the loops take them. The scales are the last."""
    blocks = BLOCKS[codec]
    count = blocks.count(elements)
    values, scales = np.split(encoded, [count * blocks.value_bytes])
    if blocks.kept is None:
        return values, scales.view(np.uint16)
    kept, places = np.split(values, [count * blocks.kept])
    return kept.view(np.int8) if codec is Codec.TOPK else kept, places, scales.view(np.uint16)


def _blocks(parts: tuple[NDArray[Any], ...], count: int, first: int, past: int) -> Iterator[NDArray[Any]]:
    """Of each part, the piece that belongs to these of ``count`` blocks."""
    sizes = (len(part) // max(1, count) for part in parts)
    return (part[size * first : size * past] for part, size in zip(parts, sizes, strict=True))


@compiled(types.void(f32_in, u16))
def _encode_raw16(x: F32, out: U16) -> None:
    bits = x.view(np.uint32)
    for i in range(x.size):
        u = bits[i]
        rounded = (u + np.uint32(0x7FFF) + ((u >> HALF) & np.uint32(1))) >> HALF
        quiet = (u >> HALF) | np.uint32(0x40)
        out[i] = np.uint16(quiet if (u & ABS) > np.uint32(0x7F800000) else rounded)


@compiled(types.void(u16_in, f32))
def _decode_raw16(halves: U16, out: F32) -> None:
    bits = out.view(np.uint32)
    for i in range(out.size):
        bits[i] = np.uint32(halves[i]) << HALF


# Below, `at` is a block's first index in an array.


@compiled()
def _scale(x: F32, at: int, size: int) -> np.uint32:
    """Bits of a block's scale; at least CEILING when the block cannot have any."""
    bits = x.view(np.uint32)
    magnitude = np.uint32(0)
    for k in range(size):
        magnitude = max(magnitude, np.uint32(bits[Index(at) + Index(k)] & ABS))
    return np.uint32(0) if magnitude < FLOOR else np.uint32((magnitude + np.uint32(0xFFFF)) >> HALF)


@compiled()
def _quantise_i8(x: F32, at: int, size: int, factor: np.float32, values: NDArray[np.int8]) -> None:
    for k in range(size):
        i = Index(at) + Index(k)
        values[i] = np.int8((x[i] * factor + ROUND) - ROUND)


@compiled()
def _quantise_i4(x: F32, at: int, half: int, factor: np.float32, values: U8, values_at: int) -> None:
    for k in range(half):
        i = Index(at) + Index(k)
        low = np.int32((x[i] * factor + ROUND) - ROUND)
        high = np.int32((x[i + Index(half)] * factor + ROUND) - ROUND)
        values[Index(values_at) + Index(k)] = np.uint8((low & np.int32(15)) | (high << np.int32(4)))


@compiled()
def _restore_i4(values: U8, values_at: int, half: int, step: np.float32, x: F32, at: int) -> None:
    for k in range(half):
        i = Index(at) + Index(k)
        both = np.int32(values[Index(values_at) + Index(k)])
        x[i] = np.float32(((both & np.int32(15)) ^ np.int32(8)) - np.int32(8)) * step
        x[i + Index(half)] = np.float32(((both >> np.int32(4)) ^ np.int32(8)) - np.int32(8)) * step


@compiled(types.boolean(f32_in, u8, u16))
def _encode_i8(x: F32, values: U8, scales: U16) -> bool:
    for b in range(scales.size):
        scale = _scale(x, 256 * b, 256)
        if scale >= CEILING:
            return False
        scales[b] = scale
        factor = LEVELS_8 / np.uint32(scale << HALF).view(np.float32) if scale else ZERO
        _quantise_i8(x, 256 * b, 256, factor, values.view(np.int8))
    return True


@compiled(types.void(u8_in, u16_in, f32))
def _decode_i8(values: U8, scales: U16, x: F32) -> None:
    signed = values.view(np.int8)
    for b in range(scales.size):
        step = np.uint32(np.uint32(scales[b]) << HALF).view(np.float32) / LEVELS_8
        for i in range(256 * b, 256 * b + 256):
            x[Index(i)] = np.float32(signed[Index(i)]) * step


@compiled(types.boolean(f32_in, u8, u16))
def _encode_i4(x: F32, values: U8, scales: U16) -> bool:
    half = min(32, x.size)
    for b in range(scales.size):
        scale = _scale(x, 64 * b, 2 * half)
        if scale >= CEILING:
            return False
        scales[b] = scale
        factor = _LEVELS_4 / np.uint32(scale << HALF).view(np.float32) if scale else ZERO
        _quantise_i4(x, 64 * b, half, factor, values, 32 * b)
    return True


@compiled(types.void(u8_in, u16_in, f32))
def _decode_i4(values: U8, scales: U16, x: F32) -> None:
    half = min(32, x.size)
    for b in range(scales.size):
        step = np.uint32(np.uint32(scales[b]) << HALF).view(np.float32) / _LEVELS_4
        _restore_i4(values, 32 * b, half, step, x, 64 * b)


_ENCODE: dict[Codec, Any] = {
    Codec.I8B256: _encode_i8,
    Codec.I4B64: _encode_i4,
    Codec.TOPK: encode_topk,
    Codec.TOP64: encode_top64,
}
_DECODE: dict[Codec, Any] = {
    Codec.I8B256: _decode_i8,
    Codec.I4B64: _decode_i4,
    Codec.TOPK: decode_topk,
    Codec.TOP64: decode_top64,
}
