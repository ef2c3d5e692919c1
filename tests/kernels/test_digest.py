"""A digest equals BLAKE3's on every device: the GPU's kernel, run on a CPU, against the library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from blake3 import blake3
from hypothesis import given, strategies as st

from dtfm.kernels.digest import digest
from tests.kernels.cuda_on_cpu import cupy_without_gpu
from tests.kernels.gpu_module import gpu_with

CHUNK = 1024


def data(size: int) -> torch.Tensor:
    return (torch.arange(size) % 251).to(torch.uint8)


def expected(tensor: torch.Tensor) -> bytes:
    return blake3(tensor.numpy().tobytes()).digest()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 100_000])
def test_on_a_cpu_it_is_the_librarys(size: int) -> None:
    assert digest(data(size)) == expected(data(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_of_the_bytes_whatever_the_dtype_and_shape(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 3000).to(dtype)
    assert digest(x) == digest(x.view(30, 100)) == expected(x.view(torch.uint8))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """kernels/gpu.py, whose device is the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile kernels/digest.cu with: apt-get install g++")
    cupy = cupy_without_gpu(tmp_path_factory.mktemp("cuda"))
    with gpu_with(cupy) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "to_host", torch.Tensor.clone)
        patch.setattr(torch.cuda, "current_stream", lambda _: None)
        yield module


@pytest.mark.parametrize("chunks", [*range(2, 18), 31, 33, 256, 257, 1000])
@pytest.mark.parametrize("over", [-1023, -65, -64, -63, -1, 0])
def test_the_kernel_makes_the_same_tree(gpu: ModuleType, chunks: int, over: int) -> None:
    x = data(chunks * CHUNK + over)
    assert gpu.digest(x) == expected(x)


@given(size=st.integers(CHUNK + 1, 70 * CHUNK), segment=st.sampled_from([1, 2, 4, 16]))
def test_the_tree_is_the_same_segment_by_segment(gpu: ModuleType, size: int, segment: int) -> None:
    x = data(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "SEGMENT_CHUNKS", segment)
        assert gpu.digest(x) == expected(x)


def test_chunks_are_counted_in_64_bits(gpu: ModuleType) -> None:
    """2^32 chunks are 4 TiB. No test has that much memory, but the value of a chunk depends on its number's upper half too."""
    values = torch.zeros(2, 32, dtype=torch.uint8)
    for row, number in enumerate((5, (1 << 32) + 5)):
        gpu._launch("digest.cu", "chunk_values", 1, data(CHUNK), CHUNK, number, values[row])
    assert not torch.equal(values[0], values[1])
