"""The bytes of each codec, written out for tensors small enough to encode by hand. Tests the reference."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from dtfm.kernels.layout import Codec
from tests.kernels import reference

QUANTISING = [Codec.I8B256, Codec.I4B64, Codec.TOPK, Codec.TOP64]


def array(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def encoded(codec: Codec, x: NDArray[np.float32]) -> bytes:
    data = reference.encode(codec, x)
    assert data is not None
    return data


def scale_bits(data: bytes) -> int:
    """The bits of a single block's scale."""
    return int.from_bytes(data[-2:], "little")


def test_the_numbers_on_the_wire() -> None:
    numbers = {"OFF": 0, "RAW16": 1, "I8B256": 2, "I4B64": 3, "TOPK": 5, "TOP64": 6}
    assert {c.name: c.value for c in Codec} == numbers


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1 + 2**-8, 0x3F80),  # half way: to the even neighbour, below
        (1 + 3 * 2**-8, 0x3F82),  # half way: to the even neighbour, above
        (1 + 2**-8 + 2**-20, 0x3F81),
        (-0.0, 0x8000),
        (1e-45, 0x0000),
        (3.4e38, 0x7F80),  # beyond bfloat16's largest
        (float("-inf"), 0xFF80),
    ],
)
def test_raw16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert encoded(Codec.RAW16, array(value)) == bits.to_bytes(2, "little")


def test_raw16_keeps_a_nan_though_it_cuts_its_only_bits_off() -> None:
    sly = np.array([0x7F800001, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert encoded(Codec.RAW16, sly) == np.array([0x7FC0, 0xFFC0, 0xFFFF], "<u2").tobytes()


def test_i8b256_values_first_then_scales() -> None:
    x = np.zeros(300, np.float32)
    x[:3] = 127, -127, 0.5  # 0.5 is half way between 0 and 1: to the even one
    x[256:258] = 254, 127
    data = encoded(Codec.I8B256, x)
    assert len(data) == 2 * 256 + 2 * 2
    assert np.frombuffer(data, np.int8, 3).tolist() == [127, -127, 0]
    assert np.frombuffer(data, np.int8, 2, 256).tolist() == [127, 64]  # 63.5, to even
    assert data[512:] == np.array([0x42FE, 0x437E], "<u2").tobytes()
    assert not any(data[3:256])
    assert not any(data[258:512])


def test_i4b64_puts_element_i_low_and_element_i_plus_32_high() -> None:
    x = np.zeros(64, np.float32)
    x[0], x[1], x[31], x[32], x[33] = 7, -7, 3, -1, 2
    data = encoded(Codec.I4B64, x)
    assert len(data) == 32 + 2
    assert data[:2] == bytes([0xF7, 0x29])
    assert data[31] == 0x03
    assert scale_bits(data) == 0x40E0


def test_scales_are_rounded_up_so_that_no_value_exceeds_them() -> None:
    data = encoded(Codec.I8B256, array(1 + 2**-20))
    assert scale_bits(data) == 0x3F81
    assert data[0] == 126  # 127 / 1.0078125 is 126.02


def test_topk_values_then_places_then_scales() -> None:
    x = np.zeros(300, np.float32)
    x[[250, 3, 100, 255, 7, 20, 30, 40, 50]] = 127, -126, 64, -32, 16, 8, 4, 2.5, 1
    x[299] = 127
    data = encoded(Codec.TOPK, x)
    assert len(data) == 2 * (8 + 8 + 2)
    values, places = np.frombuffer(data, np.int8, 16).reshape(2, 8), np.frombuffer(data, np.uint8, 16, 16).reshape(2, 8)
    assert values[0].tolist() == [-126, 16, 8, 4, 2, 64, 127, -32]  # 2.5 to even; 50 is the ninth largest
    assert places[0].tolist() == [3, 7, 20, 30, 40, 100, 250, 255]
    assert values[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 127]
    assert places[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 43]
    assert data[32:] == np.array([0x42FE, 0x42FE], "<u2").tobytes()
    decoded = reference.decode(Codec.TOPK, data, 300)
    assert np.flatnonzero(decoded).tolist() == [3, 7, 20, 30, 40, 100, 250, 255, 299]
    assert decoded[[3, 250, 299]].tolist() == [-126, 127, 127]


def test_topk_keeps_the_first_of_equal_magnitudes_whatever_their_signs() -> None:
    x = np.where(np.arange(256) % 2, -1, 1).astype(np.float32)
    x[200] = 2
    data = encoded(Codec.TOPK, x)
    assert list(data[8:16]) == [0, 1, 2, 3, 4, 5, 6, 200]


def test_top64_slots_then_ends_of_groups_then_two_scales() -> None:
    x = np.zeros(4200, np.float32)
    x[[1, 63, 64, 4095]] = 1, -1, 3, -7  # their mean is 3
    x[4196] = 2.0**-101
    data = encoded(Codec.TOP64, x)
    assert len(data) == 2 * (64 + 16 + 2 * 2)
    assert data[:4] == bytes([1, 63 | 1 << 7, 0, 63 | 1 << 6 | 1 << 7])
    assert not any(data[4:128])
    assert data[128:144] == (0b1111_0100 | sum(1 << bit for bit in range(8, 66)) | 1 << 67).to_bytes(16, "little")
    assert data[144:160] == ((1 << 64) - 1).to_bytes(16, "little")
    assert data[160:] == np.array([0x3FD5, 0x40E0, 0, 0], "<u2").tobytes()  # 5/3, to the nearest of 8 bits, and 7
    decoded = reference.decode(Codec.TOP64, data, 4200)
    assert np.flatnonzero(decoded).tolist() == [1, 63, 64, 4095]
    assert decoded[[1, 63, 64, 4095]].tolist() == [1.6640625, -1.6640625, 1.6640625, -7]


def test_top64_keeps_64_and_the_first_of_equal_magnitudes_whatever_their_signs() -> None:
    x = np.where(np.arange(4096) % 2, -1, 1).astype(np.float32)
    x[4000] = 2
    data = encoded(Codec.TOP64, x)
    assert list(data[:64]) == [*(place | (place % 2) << 7 for place in range(63)), 4000 % 64 | 1 << 6]
    assert data[80:] == np.array([0x3F80, 0x4000], "<u2").tobytes()


@pytest.mark.parametrize("codec", QUANTISING)
def test_blocks_under_2_to_the_minus_100_become_zero(codec: Codec) -> None:
    at, under = np.float32(2**-100), np.nextafter(np.float32(2**-100), np.float32(0))
    assert scale_bits(encoded(codec, array(float(at)))) == 0x0D80
    assert not reference.decode(codec, encoded(codec, array(float(under), -float(under))), 2).any()
    assert scale_bits(encoded(codec, array(float(under), -float(under)))) == 0


@pytest.mark.parametrize("codec", QUANTISING)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_values_that_no_scale_can_represent_are_not_quantised(codec: Codec, value: float) -> None:
    x = np.ones(1000, np.float32)
    x[777] = value
    assert reference.encode(codec, x) is None


GOLDEN = {
    Codec.OFF: "08cfc7faedb89cb8",
    Codec.RAW16: "6c554d216dcc2fb7",
    Codec.I8B256: "51f662ef12a0a185",
    Codec.I4B64: "87bee11dada5000a",
    Codec.TOPK: "d7d3a781ea04beb0",
    Codec.TOP64: "3cbfd55c1491bc34",
}


@pytest.mark.parametrize("codec", list(Codec))
def test_the_bytes_of_each_codec_never_change(codec: Codec) -> None:
    """Nodes of different versions may meet, so another layout needs another codec number."""
    hashed = np.arange(5000, dtype=np.uint32) * np.uint32(2654435761)
    x = np.ldexp((hashed >> 8).astype(np.float32) - 2**23, (hashed & 31).astype(np.int32) - 40).astype(np.float32)
    assert hashlib.sha256(encoded(codec, x)).hexdigest()[:16] == GOLDEN[codec]
