"""Float32 arrays with the values that are hard for codecs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from dtfm.kernels.codec import encoded_bytes
from dtfm.kernels.layout import BLOCKS, Codec

LARGEST_BF16 = 3.3895313892515355e38
FINITE = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 127.0, -63.5),
    *(1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38),  # denormals, and the smallest normal number
    *(2.0**-100, -(2.0**-100), float(np.nextafter(np.float32(2.0**-100), np.float32(0))), 2.0**-94, 2.0**-95),
    *(LARGEST_BF16, -LARGEST_BF16, 1e30, 2.0**121, 2.0**115),
)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"), 3.4028234663852886e38)
"""Values that no scale can represent. The last is finite, but rounds up to infinity as a bfloat16."""

SIZES = st.one_of(
    st.integers(0, 700), st.sampled_from([0, 1, 63, 64, 65, 128, 255, 256, 257, 512, 1024, 4095, 4096, 4097, 8200])
)


@st.composite
def float32(draw: st.DrawFn, special: tuple[float, ...] = FINITE) -> NDArray[np.float32]:
    """Normally distributed numbers of one magnitude or of many, with some ``special`` ones among them."""
    size = draw(SIZES)
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    lowest, highest = sorted((draw(st.integers(-149, 100)), draw(st.integers(-149, 100))))
    exponents = noise.integers(lowest, highest, size, endpoint=True)
    x = np.ldexp(noise.standard_normal(size), exponents).astype(np.float32)
    for place in draw(st.lists(st.integers(0, size - 1), max_size=8)) if size else []:
        x[place] = draw(st.sampled_from(special))
    return x


def arrays_to_choose_from() -> Iterator[NDArray[np.float32]]:
    """Arrays in which it is hard to say which elements are the largest: equal magnitudes, hardly any but 0, and large ones that
    are all in a few columns, for rows of any length."""
    noise = np.random.default_rng(0)
    size = 2 * 4096 + 300
    yield np.full(size, -2.0, np.float32)
    for levels in (2, 5, 40):
        yield noise.integers(-levels, levels, size, endpoint=True).astype(np.float32)
    for density in (0.001, 0.01, 0.05):
        yield (noise.standard_normal(size) * (noise.random(size) < density)).astype(np.float32)
    for row, columns in ((32, 7), (32, 9), (512, 60), (512, 70)):
        yield (noise.standard_normal(size) * np.where(np.arange(size) % row < columns, 1000, 1)).astype(np.float32)


def any_bytes(codec: Codec, elements: int, seed: int, tame: bool) -> NDArray[np.uint8]:
    """Random bytes, as many as ``elements`` take. ``tame`` makes all scales and places valid, so that a decoder reaches the
    values too."""
    if tame and codec is Codec.TOP64:
        return _tame_top64(elements, seed)
    data = np.random.default_rng(seed).integers(0, 256, encoded_bytes(codec, elements, torch.float32), np.uint8)
    if tame and codec is not Codec.RAW16 and elements:
        count = BLOCKS[codec].count(elements)
        data[-2 * count :] = np.random.default_rng(seed).integers(0x1080, 0x7C00, count).astype("<u2").view(np.uint8)
        if kept := BLOCKS[codec].kept:
            shuffled = np.random.default_rng(seed).permuted(np.tile(np.arange(256), (count, 1)), axis=1)
            data[kept * count : 2 * kept * count] = np.sort(shuffled[:, :kept], axis=1).reshape(-1)
    return data


def _tame_top64(elements: int, seed: int) -> NDArray[np.uint8]:
    random, count = np.random.default_rng(seed), BLOCKS[Codec.TOP64].count(elements)
    slots, ends = np.zeros((count, 64), np.uint8), np.zeros((count, 128), np.uint8)
    scales = np.zeros((count, 2), "<u2")
    for block in range(count):
        last = min(4096, elements - 4096 * block)
        places = np.sort(random.permutation(last)[: random.integers(0, min(64, last), endpoint=True)])
        slots[block, : len(places)] = places % 64 | random.integers(0, 4, len(places)) << 6
        of_group = np.bincount(places // 64, minlength=64)
        ends[block, np.cumsum(of_group) + np.arange(64)] = 1
        if len(places):
            scales[block] = random.integers(0x1080, 0x7C00, 2)
    packed = np.packbits(ends, axis=1, bitorder="little")
    return np.concatenate([slots.reshape(-1), packed.reshape(-1), scales.reshape(-1).view(np.uint8)])
