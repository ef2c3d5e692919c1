"""The compiled codecs equal the reference bit for bit, for all inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dtfm.kernels import cpu
from dtfm.kernels.codec import encoded_bytes
from dtfm.kernels.layout import Codec
from tests.kernels import reference
from tests.kernels.arrays import FINITE, NOT_FINITE, SIZES, any_bytes, arrays_to_choose_from, float32

CODECS = [c for c in Codec if c is not Codec.OFF]
each_codec = pytest.mark.parametrize("codec", CODECS)


def encoded(codec: Codec, x: NDArray[np.float32]) -> bytes | None:
    out = np.full(encoded_bytes(codec, x.size, torch.float32), 0xAA, np.uint8)
    return out.tobytes() if cpu.encode(codec, x, out) else None


def decoded(codec: Codec, data: bytes, elements: int) -> NDArray[np.float32] | str:
    out = np.full(elements, np.nan, np.float32)
    try:
        cpu.decode(codec, np.frombuffer(data, np.uint8), out)
    except ValueError as error:
        return str(error)
    return out


@each_codec
@given(x=float32(FINITE + NOT_FINITE))
def test_encodes_as_the_reference(codec: Codec, x: NDArray[np.float32]) -> None:
    assert encoded(codec, x) == reference.encode(codec, x)


@each_codec
@pytest.mark.parametrize("elements", [1, 64])
@pytest.mark.parametrize("value", FINITE + NOT_FINITE)
def test_encodes_as_the_reference_at_the_borders(codec: Codec, value: float, elements: int) -> None:
    x = np.full(elements, value, np.float32)
    assert encoded(codec, x) == reference.encode(codec, x)


@each_codec
def test_encodes_as_the_reference_where_it_is_hard_to_choose(codec: Codec) -> None:
    for x in arrays_to_choose_from():
        assert encoded(codec, x) == reference.encode(codec, x)


@each_codec
@given(x=float32())
def test_decodes_as_the_reference(codec: Codec, x: NDArray[np.float32]) -> None:
    data = reference.encode(codec, x)
    assert data is not None
    out = decoded(codec, data, x.size)
    assert isinstance(out, np.ndarray)
    assert out.tobytes() == reference.decode(codec, data, x.size).tobytes()


@each_codec
@given(elements=SIZES, seed=st.integers(0, 2**32), tame=st.booleans())
def test_decodes_or_refuses_any_bytes_as_the_reference(codec: Codec, elements: int, seed: int, tame: bool) -> None:
    data = any_bytes(codec, elements, seed, tame)
    out = decoded(codec, data.tobytes(), elements)
    if isinstance(out, str):
        with pytest.raises(ValueError, match=r"that no encoder writes|that do not increase"):
            reference.decode(codec, data.tobytes(), elements)
        assert not tame
    else:
        assert out.tobytes() == reference.decode(codec, data.tobytes(), elements).tobytes()


@each_codec
def test_large_tensors_too(codec: Codec) -> None:
    x = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    data = encoded(codec, x)
    assert data is not None
    assert data == reference.encode(codec, x)
    out = decoded(codec, data, x.size)
    assert isinstance(out, np.ndarray)
    assert out.tobytes() == reference.decode(codec, data, x.size).tobytes()


@each_codec
def test_decodes_bytes_at_any_address(codec: Codec) -> None:
    x = np.random.default_rng(0).standard_normal(321).astype(np.float32)
    data = reference.encode(codec, x)
    assert data is not None
    out = np.empty(x.size, np.float32)
    cpu.decode(codec, np.frombuffer(b"?" + data, np.uint8)[1:], out)
    assert out.tobytes() == reference.decode(codec, data, x.size).tobytes()
