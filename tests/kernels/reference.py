"""The codecs exactly as kernels/layout.py describes them, in plain NumPy. The product's must equal them bit for bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dtfm.kernels.layout import BF16_INFINITY, BLOCKS, SMALLEST, Blocks, Codec, check

Floats = NDArray[np.float32]


def encode(codec: Codec, elements: Floats) -> bytes | None:
    """The bytes of 1-D ``elements`` under ``codec``.

    Returns None when the codec is a quantising one and ``elements`` contains a NaN, an infinity or a value too large
    for its scales.
    """
    if codec is Codec.OFF:
        return elements.tobytes()
    if codec is Codec.RAW16:
        return _bf16(elements).tobytes()
    layout = BLOCKS[codec]
    x = np.zeros((layout.count(elements.size), layout.block), np.float32)
    x.reshape(-1)[: elements.size] = elements
    if codec is Codec.TOP64:
        return _encode_top64(x)
    magnitude = np.max(x.view(np.uint32) & 0x7FFFFFFF, axis=1)
    places = None if layout.kept is None else _largest(x, layout.kept)
    if places is not None:
        x = np.take_along_axis(x, places.astype(np.intp), axis=1)
    zero = magnitude < SMALLEST
    scales = np.where(zero, 0, (magnitude + 0xFFFF) >> 16)
    if np.any(scales >= BF16_INFINITY):
        return None
    values = np.zeros(x.shape, np.int8)
    factor = np.float32(layout.levels) / _from_bf16(scales[~zero])
    values[~zero] = np.rint(x[~zero] * factor[:, None])
    return (
        _pack(values, layout).tobytes() + (b"" if places is None else places.tobytes()) + scales.astype("<u2").tobytes()
    )


def decode(codec: Codec, encoded: bytes, elements: int) -> Floats:
    """The ``elements`` float32 numbers that ``encoded`` stands for.

    Raises ValueError for scales or places that no encoder writes.
    """
    if codec is Codec.OFF:
        return np.frombuffer(encoded, np.float32, elements)
    if codec is Codec.RAW16:
        return _from_bf16(np.frombuffer(encoded, "<u2", elements))
    check(codec, np.frombuffer(encoded, np.uint8), elements)
    layout = BLOCKS[codec]
    if codec is Codec.TOP64:
        return _decode_top64(encoded, layout.count(elements)).reshape(-1)[:elements]
    count = layout.count(elements)
    packed = np.frombuffer(encoded, np.uint8, count * layout.value_bytes).reshape(count, layout.value_bytes)
    scales = np.frombuffer(encoded, "<u2", count, packed.size)
    places = None
    if layout.kept is not None:
        packed, places = packed.reshape(2, count, layout.kept)
    step = _from_bf16(scales) / np.float32(layout.levels)
    x = _unpack(packed, layout).astype(np.float32) * step[:, None]
    if places is not None:
        x = _spread(x, places, layout.block)
    return x.reshape(-1)[:elements]


def _bf16(x: Floats) -> NDArray[np.uint16]:
    """Bits of ``x`` rounded to bfloat16. A NaN keeps its sign and upper bits and becomes quiet."""
    bits = x.view(np.uint32)
    # In 64 bits, because the carry must not wrap around.
    rounded = (bits + np.uint64(0x7FFF) + (bits >> 16 & 1)) >> np.uint64(16)
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype("<u2")


def _from_bf16(bits: NDArray[np.uint16] | NDArray[np.uint32]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _pack(values: NDArray[np.int8], layout: Blocks) -> NDArray[np.uint8]:
    bits = values.view(np.uint8)
    if layout.bits == 8:
        return bits
    half = layout.block // 2
    return (bits[:, :half] & np.uint8(0x0F)) | (bits[:, half:] << np.uint8(4))


def _unpack(packed: NDArray[np.uint8], layout: Blocks) -> NDArray[np.int8]:
    if layout.bits == 8:
        return packed.view(np.int8)
    return np.concatenate([(packed << 4).view(np.int8) >> 4, packed.view(np.int8) >> 4], axis=1)


def _largest(x: Floats, kept: int) -> NDArray[np.uint8]:
    """Places of the ``kept`` elements with the largest magnitudes in each row of ``x`` [blocks, block], in increasing order."""
    magnitude = (x.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    return np.sort(np.argsort(-magnitude, axis=1, kind="stable")[:, :kept], axis=1).astype(np.uint8)


def _spread(values: Floats, places: NDArray[np.uint8], block: int) -> Floats:
    x = np.zeros((len(values), block), np.float32)
    np.put_along_axis(x, places.astype(np.intp), values, axis=1)
    return x


def _encode_top64(x: Floats) -> bytes | None:
    """The bytes of the blocks [blocks, 4096]; None as for `encode`."""
    slots, ends, scales = bytearray(), bytearray(), bytearray()
    for block in x:
        bits = block.view(np.uint32) & 0x7FFFFFFF
        if np.any(bits >= 0x7F800000):
            return None
        places = np.argsort(-bits.astype(np.int64), kind="stable")[:64]
        places = np.sort(places[bits[places] >= SMALLEST])
        magnitudes, count = np.abs(block[places]), len(places)
        is_large = magnitudes > _mean(magnitudes, np.full(count, fill_value=True))
        kinds = [kind for kind in (~is_large, is_large) if kind.any()]
        means = _bf16(np.array([_mean(magnitudes, kind) for kind in kinds] or [np.float32(0)], np.float32))
        if np.any(means >= BF16_INFINITY):
            return None
        scales += np.broadcast_to(means, 2).tobytes()
        of_block = places % 64 | is_large << 6 | (block[places] < 0).astype(np.int64) << 7
        slots += bytes(of_block.tolist()) + bytes(64 - count)
        code = [bit for group in range(64) for bit in (0,) * np.count_nonzero(places // 64 == group) + (1,)]
        ends += np.packbits(np.array(code + [0] * (128 - len(code)), np.uint8), bitorder="little").tobytes()
    return bytes(slots + ends + scales)


def _mean(magnitudes: Floats, counted: NDArray[np.bool_]) -> np.float32:
    rest = np.zeros(64, np.float32)
    rest[: len(magnitudes)] = np.where(counted, magnitudes, np.float32(0)) * np.float32(1 / 64)
    while len(rest) > 1:
        rest = rest[: len(rest) // 2] + rest[len(rest) // 2 :]
    return np.float32(rest[0] / np.float32(max(1, int(np.count_nonzero(counted))) / 64))


def _decode_top64(encoded: bytes, count: int) -> Floats:
    """The blocks [count, 4096]."""
    x = np.zeros((count, 4096), np.float32)
    slots, ends, scales = encoded[: 64 * count], encoded[64 * count : 80 * count], encoded[80 * count :]
    values = _from_bf16(np.frombuffer(scales, "<u2")).reshape(count, 2)
    for block in range(count):
        group, of_block = 0, iter(slots[64 * block : 64 * block + 64])
        for bit in np.unpackbits(np.frombuffer(ends, np.uint8, 16, 16 * block), bitorder="little"):
            if bit:
                group += 1
            elif group < 64:
                slot = next(of_block)
                value = values[block, slot >> 6 & 1]
                x[block, 64 * group + slot % 64] = -value if slot & 128 else value
    return x
