"""Gradients for standbys arrive bit for bit, few bytes where most are zero, and bytes from elsewhere are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.node.state.update import pack, unpack

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(size=st.integers(0, 300), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_the_same_bits_arrive(dtype: torch.dtype, size: int, share: float, seed: int) -> None:
    noise = np.random.default_rng(seed)
    values = noise.standard_normal(size) * (noise.random(size) < share)
    values[noise.random(size) < 0.1] *= -1.0  # some are -0.0
    gradients = torch.from_numpy(values).to(dtype)
    packed = pack(gradients)
    assert len(packed) <= gradients.nbytes
    assert unpack(bytearray(packed), size, dtype).numpy().tobytes() == gradients.numpy().tobytes()


def test_zeros_take_no_bytes() -> None:
    gradients = torch.zeros(10_000)
    gradients[::100] = 1.5
    assert len(pack(gradients)) == 100 * 8


def test_what_is_packed_does_not_change_with_the_gradients() -> None:
    gradients = torch.ones(8)
    packed = bytearray(pack(gradients))
    kept = pack(gradients)
    gradients.zero_()
    assert bytearray(kept) == packed


@pytest.mark.parametrize("places", [[3, 3], [5, 2], [0, 10]], ids=["twice", "disorder", "beyond"])
def test_places_that_nobody_packs_are_refused(places: list[int]) -> None:
    data = np.array(places, "<u4").tobytes() + np.ones(len(places), np.float32).tobytes()
    with pytest.raises(ValueError, match="are not 10 elements"):
        unpack(data, 10, torch.float32)


@pytest.mark.parametrize("size", [3, 12, 36])
def test_a_length_that_nobody_packs_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="are not 10 elements"):
        unpack(bytes(size), 10, torch.float32)
