"""Gradients for standbys arrive bit for bit, few bytes where most are zero, and bytes from elsewhere are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.coordinator.core.copies.wanted_standbys import UPDATE
from dtfm.kernels.codec import Codec, Encoded, decode, encode, encoded_bytes
from dtfm.node.state.update import pack, unpack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]


def arrived(packed: Encoded, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return unpack(packed.codec, bytearray(packed.data), elements, dtype)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(size=st.integers(0, 300), share=st.floats(0, 1), seed=st.integers(0, 2**32), codec=st.sampled_from([*Codec]))
def test_the_same_bits_arrive(dtype: torch.dtype, size: int, share: float, seed: int, codec: Codec) -> None:
    noise = np.random.default_rng(seed)
    values = noise.standard_normal(size) * (noise.random(size) < share)
    values[noise.random(size) < 0.1] *= -1.0  # some are -0.0
    values[noise.random(size) < 0.01] = np.nan
    gradients = torch.from_numpy(values).to(dtype)
    packed = pack(gradients, codec)
    assert len(packed.data) <= gradients.nbytes
    assert arrived(packed, size, dtype).numpy().tobytes() == gradients.numpy().tobytes()


@pytest.mark.parametrize("codec", [Codec.OFF, Codec.RAW16, Codec.I4B64])
def test_muons_updates_come_after_the_gradients(codec: Codec) -> None:
    gradients = torch.randn(500, generator=torch.Generator().manual_seed(1))
    updates = torch.randn(301, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = pack(gradients, codec, updates)
    assert len(packed.data) <= gradients.nbytes + updates.nbytes
    found = unpack(packed.codec, bytearray(packed.data), 500, torch.float32, 301)
    assert all(map(torch.equal, found, (gradients, updates)))
    with pytest.raises(ValueError, match="600 bytes are less than 301 updates have"):
        unpack(packed.codec, bytearray(packed.data)[:600], 500, torch.float32, 301)


def test_zeros_take_no_bytes() -> None:
    gradients = torch.zeros(10_000)
    gradients[::100] = 1.5
    assert len(pack(gradients, Codec.OFF).data) == 100 * 8


@pytest.mark.parametrize(("codec", "ratio"), [*UPDATE.items()])
def test_what_comes_out_of_a_codec_takes_about_as_many_bytes_as_are_planned(codec: str, ratio: float) -> None:
    named = Codec.I4B64 if codec == "auto" else Codec[codec.upper()]
    made = encode(named, torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)))
    gradients = decode(made.codec, made.data, 1 << 20, torch.float32, CPU)
    assert len(pack(gradients, named).data) / gradients.nbytes == pytest.approx(ratio, rel=0.05)


def test_what_is_packed_does_not_change_with_the_gradients() -> None:
    gradients = torch.ones(8)
    packed = bytearray(pack(gradients, Codec.OFF).data)
    kept = pack(gradients, Codec.OFF)
    gradients.zero_()
    assert bytearray(kept.data) == packed


@pytest.mark.parametrize("codec", [Codec.OFF, Codec.I4B64])
@pytest.mark.parametrize("places", [[3, 3], [5, 2], [0, 10]], ids=["twice", "disorder", "beyond"])
def test_places_that_nobody_packs_are_refused(places: list[int], codec: Codec) -> None:
    base = bytes(encoded_bytes(codec, 10, torch.float32) if codec else 0)
    data = base + np.array(places, "<u4").tobytes() + np.ones(len(places), np.float32).tobytes()
    with pytest.raises(ValueError, match="are not 10 elements"):
        unpack(codec, bytearray(data), 10, torch.float32)


@pytest.mark.parametrize(("codec", "size"), [(Codec.OFF, 3), (Codec.OFF, 12), (Codec.OFF, 36), (Codec.I4B64, 3)])
def test_a_length_that_nobody_packs_is_refused(codec: Codec, size: int) -> None:
    with pytest.raises(ValueError, match="are not 10 elements"):
        unpack(codec, bytearray(size), 10, torch.float32)
