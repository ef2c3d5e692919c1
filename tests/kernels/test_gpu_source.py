"""The GPU's kernels equal the reference bit for bit: CuPy's source, run on a CPU lane by lane."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dtfm.kernels.codec import encoded_bytes
from dtfm.kernels.layout import Codec
from tests.kernels import reference
from tests.kernels.arrays import FINITE, NOT_FINITE, SIZES, any_bytes, arrays_to_choose_from, float32
from tests.kernels.cuda_on_cpu import cupy_without_gpu
from tests.kernels.gpu_module import gpu_with

CPU = torch.device("cpu")
CODECS = [c for c in Codec if c is not Codec.OFF]
NATIVE = [torch.float32, torch.bfloat16]
each_codec = pytest.mark.parametrize("codec", CODECS)
each_native = pytest.mark.parametrize("dtype", NATIVE, ids=str)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """kernels/gpu.py, whose device is the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile kernels/codecs.cu with: apt-get install g++")
    cupy = cupy_without_gpu(tmp_path_factory.mktemp("cuda"))
    with gpu_with(cupy) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "to_host", torch.Tensor.clone)
        patch.setattr(module, "to_device", lambda data, _: torch.frombuffer(bytearray(data), dtype=torch.uint8))
        patch.setattr(torch.cuda, "current_stream", lambda _: None)
        yield module


def encoded(gpu: ModuleType, codec: Codec, x: torch.Tensor) -> bytes | None:
    data = gpu.encode(codec, x, encoded_bytes(codec, x.numel(), x.dtype))
    return None if data is None else bytes(data)


def bits(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def starting_at(offset: int, x: torch.Tensor) -> torch.Tensor:
    """``x``, ``offset`` elements behind an address where several can be moved at once."""
    room = torch.empty(offset + x.numel(), dtype=x.dtype)
    room[offset:] = x
    return room[offset:]


@each_codec
@each_native
@given(x=float32(FINITE + NOT_FINITE), offset=st.integers(0, 3))
def test_encodes_as_the_reference(
    gpu: ModuleType, codec: Codec, dtype: torch.dtype, x: NDArray[np.float32], offset: int
) -> None:
    elements = starting_at(offset, torch.from_numpy(x).to(dtype))
    assert encoded(gpu, codec, elements) == reference.encode(codec, elements.float().numpy())


@each_codec
@pytest.mark.parametrize("elements", [1, 64])
def test_encodes_as_the_reference_at_the_borders(gpu: ModuleType, codec: Codec, elements: int) -> None:
    for value in FINITE + NOT_FINITE:
        x = np.full(elements, value, np.float32)
        assert encoded(gpu, codec, torch.from_numpy(x)) == reference.encode(codec, x), value
        x[0] = 2.0**-94
        assert encoded(gpu, codec, torch.from_numpy(x)) == reference.encode(codec, x), (x[0], value)


@each_codec
def test_encodes_as_the_reference_where_it_is_hard_to_choose(gpu: ModuleType, codec: Codec) -> None:
    for x in arrays_to_choose_from():
        assert encoded(gpu, codec, torch.from_numpy(x)) == reference.encode(codec, x)


@each_native
def test_raw16_keeps_a_nan_though_it_cuts_its_only_bits_off(gpu: ModuleType, dtype: torch.dtype) -> None:
    sly = torch.tensor([0x7F800001, -0x7FFFFF, 0x7F810000, -1], dtype=torch.int32).view(torch.float32)
    x = sly if dtype is torch.float32 else sly.view(torch.bfloat16)[1::2].contiguous()
    assert encoded(gpu, Codec.RAW16, x) == reference.encode(Codec.RAW16, x.float().numpy())


@each_codec
@each_native
@given(x=float32(), offset=st.integers(0, 3))
def test_decodes_as_the_reference(
    gpu: ModuleType, codec: Codec, dtype: torch.dtype, x: NDArray[np.float32], offset: int
) -> None:
    data = reference.encode(codec, x)
    assert data is not None
    if not x.size:
        return
    out = starting_at(offset, torch.empty(x.size, dtype=dtype))
    gpu.decode_into(codec, torch.frombuffer(bytearray(data), dtype=torch.uint8), out)
    assert bits(out) == bits(torch.from_numpy(reference.decode(codec, data, x.size).copy()).to(dtype))


@each_codec
@given(elements=SIZES, seed=st.integers(0, 2**32), tame=st.booleans())
def test_decodes_or_refuses_any_bytes_as_the_reference(
    gpu: ModuleType, codec: Codec, elements: int, seed: int, tame: bool
) -> None:
    data = any_bytes(codec, elements, seed, tame)
    try:
        expected = reference.decode(codec, data.tobytes(), elements).tobytes()
    except ValueError:
        with pytest.raises(ValueError, match=r"that no encoder writes|that do not increase"):
            gpu.decode(codec, data.data, elements, torch.float32, CPU)
        assert not tame
    else:
        assert bits(gpu.decode(codec, data.data, elements, torch.float32, CPU)) == expected


@each_codec
@each_native
@pytest.mark.parametrize("elements", [1, 63, 65, 256, 2047, 2049, 5000])
def test_writes_nowhere_else(gpu: ModuleType, codec: Codec, dtype: torch.dtype, elements: int) -> None:
    x = torch.linspace(-1, 1, elements, dtype=dtype)
    length = encoded_bytes(codec, elements, dtype)
    room = torch.full((length + 512,), 0xAA, dtype=torch.uint8)
    refused = torch.zeros(1, dtype=torch.int32)
    gpu.encode_into(codec, x, room, refused)
    data = reference.encode(codec, x.float().numpy())
    assert room[:length].numpy().tobytes() == data
    assert torch.all(room[length:] == 0xAA)
    assert refused.item() == 0
    out = torch.full((elements + 512,), 7, dtype=dtype)
    gpu.decode_into(codec, room, out[:elements])
    assert torch.all(out[elements:] == 7)


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_cast_before_and_after(gpu: ModuleType, codec: Codec, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 999, dtype=dtype)
    data = encoded(gpu, codec, x)
    assert data is not None
    assert data == reference.encode(codec, x.float().numpy())
    y = gpu.decode(codec, memoryview(data), 999, dtype, CPU)
    assert y.dtype == dtype
    assert torch.equal(y, torch.from_numpy(reference.decode(codec, data, 999).copy()).to(dtype))
