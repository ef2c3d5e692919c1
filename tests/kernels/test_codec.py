"""The properties that nodes rely on: lengths known in advance, bounded errors, and received bytes that are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from dtfm.kernels.codec import DTYPES, Codec, codec_named, decode, encode, encoded_bytes
from dtfm.kernels.layout import BLOCKS
from tests.kernels.arrays import float32

CPU = torch.device("cpu")
QUANTISING = [Codec.I8B256, Codec.I4B64, Codec.TOPK, Codec.TOP64]
each_codec = pytest.mark.parametrize("codec", list(Codec))
each_dense = pytest.mark.parametrize("codec", [c for c in Codec if not c.sparse])
each_quantising = pytest.mark.parametrize("codec", QUANTISING)


def there_and_back(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    encoded = encode(codec, x)
    return decode(encoded.codec, encoded.data, x.numel(), x.dtype, CPU).view(x.shape)


def largest_of_block(x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """Per element, the largest magnitude of its block."""
    padded = np.zeros(-(-x.size // block) * block, np.float32)
    padded[: x.size] = np.abs(x)
    return np.repeat(padded.reshape(-1, block).max(1), block)[: x.size]


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(Codec.RAW16, 16), (Codec.I8B256, 8.0625), (Codec.I4B64, 4.25), (Codec.TOPK, 0.5625), (Codec.TOP64, 0.1640625)],
)
def test_bits_per_element(codec: Codec, bits: float) -> None:
    assert encoded_bytes(codec, 1 << 20, torch.float32) * 8 == bits * (1 << 20)


@each_codec
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("elements", [0, 1, 64, 1000])
def test_the_length_follows_from_codec_elements_and_dtype(codec: Codec, dtype: torch.dtype, elements: int) -> None:
    encoded = encode(codec, torch.linspace(-1, 1, elements, dtype=dtype))
    assert encoded.codec is codec
    assert len(encoded.data) == encoded_bytes(codec, elements, dtype)


@each_dense
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_as_itself(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 999, dtype=dtype)
    y = there_and_back(codec, x)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y, x, rtol=0, atol={Codec.OFF: 0, Codec.RAW16: 2**-8, Codec.I8B256: 2**-6}.get(codec, 0.4)
    )


def test_off_changes_nothing_and_copies_nothing() -> None:
    x = torch.randn(10, dtype=torch.float64)
    encoded = encode(Codec.OFF, x)
    x[3] = 7.0
    assert torch.equal(decode(Codec.OFF, encoded.data, 10, torch.float64, CPU), x)


@each_codec
def test_elements_go_row_by_row_whatever_their_strides(codec: Codec) -> None:
    x = torch.linspace(0, 1, 600).view(20, 30)
    assert bytes(encode(codec, x.T).data) == bytes(encode(codec, x.T.clone(memory_format=torch.contiguous_format)).data)


@pytest.mark.parametrize(("codec", "levels"), [(Codec.I8B256, 127), (Codec.I4B64, 7)])
@given(x=float32())
def test_error_zero_and_sign(codec: Codec, levels: int, x: NDArray[np.float32]) -> None:
    y = there_and_back(codec, torch.from_numpy(x)).numpy()
    largest = largest_of_block(x, BLOCKS[codec].block).astype(np.float64)
    # Half a level, of a scale that rounding up made at most 1/128 larger. Magnitudes below 2^-100 may become 0.
    bound = np.where(largest < 2.0**-100, largest, largest / levels * 0.5 * (1 + 2**-7) * (1 + 2**-20))
    assert np.all(np.abs(y.astype(np.float64) - x) <= bound)
    assert np.all(y[x == 0] == 0)
    assert np.all((y == 0) | (np.sign(y) == np.sign(x)))
    assert np.all(np.isfinite(y))


@given(x=float32())
def test_topk_keeps_the_largest_to_half_a_level_and_nothing_else(x: NDArray[np.float32]) -> None:
    y = there_and_back(Codec.TOPK, torch.from_numpy(x)).numpy()
    for start in range(0, x.size, 256):
        before, after = x[start : start + 256].astype(np.float64), y[start : start + 256]
        largest = np.abs(before).max()
        smallest_kept = np.sort(np.abs(before))[-min(8, before.size)]
        bound = np.where(np.abs(before) >= smallest_kept, largest / 127 * 0.5 * (1 + 2**-7) * (1 + 2**-20), np.inf)
        sent = after != 0
        assert np.count_nonzero(sent) <= 8
        assert np.all(np.abs(before[sent]) >= smallest_kept)
        if largest >= 2.0**-100:
            assert np.all(np.abs(after - before)[sent] <= bound[sent])
            above = np.abs(before) > smallest_kept
            assert np.all(np.abs(after - before)[above] <= bound[above])


@given(x=float32())
def test_top64_keeps_the_largest_with_their_signs_and_the_sum_of_their_magnitudes(x: NDArray[np.float32]) -> None:
    y = there_and_back(Codec.TOP64, torch.from_numpy(x)).numpy().astype(np.float64)
    for start in range(0, x.size, 4096):
        before, after = x[start : start + 4096].astype(np.float64), y[start : start + 4096]
        sent, far_from_zero = after != 0, np.abs(before) >= 2.0**-100
        assert np.count_nonzero(sent) == min(64, np.count_nonzero(far_from_zero))
        assert np.all(np.sign(after[sent]) == np.sign(before[sent]))
        if sent.any():
            assert np.abs(before[sent]).min() >= np.abs(before[~sent]).max(initial=0)
            assert np.unique(np.abs(after[sent])).size <= 2
            assert np.abs(after).sum() == pytest.approx(np.abs(before[sent]).sum(), rel=2**-8)


def test_top64_of_normal_numbers_loses_little_of_what_it_sends() -> None:
    """Two values for all 64: of the squared magnitudes it sends, less than a fiftieth is lost by rounding."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 18, np.float32))
    y = there_and_back(Codec.TOP64, x)
    sent = y != 0
    assert (y - x)[sent].square().sum() < x[sent].square().sum() / 50


@each_quantising
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_tensor_that_is_not_finite_is_sent_as_raw16_and_marked_so(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.ones(500, dtype=dtype)
    x[100], x[200], x[300] = float("nan"), float("inf"), -float("inf")
    encoded = encode(codec, x)
    assert encoded.codec is Codec.RAW16
    assert len(encoded.data) == encoded_bytes(Codec.RAW16, 500, dtype)
    torch.testing.assert_close(there_and_back(codec, x), x, rtol=0, atol=0, equal_nan=True)


@each_codec
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_length_is_refused(codec: Codec, difference: int) -> None:
    length = encoded_bytes(codec, 100, torch.float32) + difference
    with pytest.raises(ValueError, match=f"{length} bytes cannot be 100 elements"):
        decode(codec, memoryview(bytes(length)), 100, torch.float32, CPU)


@each_quantising
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F80, 0xBF80, 0x8000, 0x0001, 0x0D7F])
def test_a_scale_that_no_encoder_writes_is_refused(codec: Codec, bits: int) -> None:
    data = bytearray(encode(codec, torch.ones(1000)).data)
    data[-2:] = bits.to_bytes(2, "little")
    with pytest.raises(ValueError, match=f"{bits:#06x}"):
        decode(codec, memoryview(data), 1000, torch.float32, CPU)


@pytest.mark.parametrize("places", [[0, 0, 1, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2, 1, 0], [1, 2, 3, 4, 5, 6, 255, 7]])
def test_places_that_do_not_increase_are_refused(places: list[int]) -> None:
    data = bytearray(encode(Codec.TOPK, torch.ones(1000)).data)
    data[8 * 4 + 8 : 8 * 4 + 16] = bytes(places)
    with pytest.raises(ValueError, match="1 of 4 blocks have places that do not increase"):
        decode(Codec.TOPK, memoryview(data), 1000, torch.float32, CPU)


SLOTS, ENDS, SCALES = 0, 2 * 64, 2 * 80
"""Where these begin among the bytes of two blocks of TOP64."""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({SLOTS + 1: 0}, "1 of 2 blocks have places that do not increase"),
        ({SLOTS + 64 + 5: 3}, "1 of 2 blocks have places that do not increase"),
        ({ENDS + 8: 0xFE}, "1 of 2 blocks have a number of groups that no encoder writes, the first 63 instead of 64"),
        ({ENDS: 0x01}, "1 of 2 blocks have a number of groups that no encoder writes, the first 65 instead of 64"),
        ({ENDS + 16 + 1: 0xFE, ENDS + 16 + 9: 0x01}, "a slot without an element"),
        ({SLOTS + 64 + 63: 1}, "a slot without an element"),
        ({SCALES: 0, SCALES + 1: 0}, "a scale without elements"),
        ({SCALES + 6: 0, SCALES + 7: 0}, "a scale without elements"),
        ({SLOTS + 64 + 9: 10}, "there are places behind the last of 4106 elements"),
        ({SCALES + 3: 0xFF}, "1 of 4 scales have bits that no encoder writes, the first 0xff80"),
    ],
)
def test_bytes_that_top64_never_writes_are_refused(changes: dict[int, int], problem: str) -> None:
    """Of the first block's 64 ones the places are 0 to 63, all in its first group; the second block has ten elements."""
    data = bytearray(encode(Codec.TOP64, torch.ones(4106)).data)
    assert data[SLOTS : SLOTS + 74] == bytes([*range(64), *range(10)])
    assert data[ENDS : ENDS + 32] == b"\0" * 8 + b"\xff" * 8 + b"\x00\xfc" + b"\xff" * 7 + b"\x03" + b"\0" * 6
    for at, byte in changes.items():
        data[at] = byte
    with pytest.raises(ValueError, match=problem):
        decode(Codec.TOP64, memoryview(data), 4106, torch.float32, CPU)


def test_sparse_codecs_are_not_for_activations() -> None:
    assert [codec for codec in Codec if codec.sparse] == [Codec.TOPK, Codec.TOP64]


def test_codecs_by_name() -> None:
    assert codec_named("i8b256") is Codec.I8B256
    with pytest.raises(
        ValueError, match="there is no codec 'zip'; this version has off, raw16, i8b256, i4b64, topk, top64"
    ):
        codec_named("zip")
