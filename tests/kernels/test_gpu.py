"""The codecs on a GPU: the same bytes as everywhere, on the caller's stream, through pinned memory that is reused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dtfm.kernels import transfer
from dtfm.kernels.codec import DTYPES, Codec, decode, encode, encode_with_feedback, encoded_bytes
from dtfm.kernels.digest import digest
from dtfm.kernels.memory import Memory
from tests.kernels import reference
from tests.kernels.arrays import FINITE, NOT_FINITE, arrays_to_choose_from, float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU; test_gpu_source.py runs the same kernels without one"
    ),
]

GPU = torch.device("cuda", 0)
MANY = 10_000_019  # a prime: no block, tile or thread block is full at its end
CYCLES = 500_000_000  # a few tenths of a second
QUANTISING = [Codec.I8B256, Codec.I4B64, Codec.TOPK, Codec.TOP64]
each_codec = pytest.mark.parametrize("codec", list(Codec))
each_quantising = pytest.mark.parametrize("codec", QUANTISING)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


@pytest.fixture(autouse=True)
def _with_cupy() -> None:
    pytest.importorskip("cupy", reason="dtfm-node install-line | sh")


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]


def on_gpu(x: NDArray[np.float32], offset: int = 0) -> torch.Tensor:
    """``x`` from ``offset`` elements on behind an address where several can be moved at once."""
    room = torch.empty(offset + x.size, device=GPU)
    room[offset:] = torch.from_numpy(x)
    return room[offset:]


@each_codec
@given(x=float32(FINITE + NOT_FINITE), offset=st.integers(0, 3))
def test_encodes_as_the_reference_or_falls_back_to_raw16(codec: Codec, x: NDArray[np.float32], offset: int) -> None:
    encoded = encode(codec, on_gpu(x, offset))
    expected = reference.encode(codec, x)
    assert encoded.codec is (codec if expected is not None else Codec.RAW16)
    assert bytes(encoded.data) == (expected if expected is not None else reference.encode(Codec.RAW16, x))


@each_codec
def test_encodes_as_the_reference_where_it_is_hard_to_choose(codec: Codec) -> None:
    for x in arrays_to_choose_from():
        assert bytes(encode(codec, on_gpu(x)).data) == reference.encode(codec, x)


@each_codec
@given(x=float32())
def test_decodes_as_the_reference(codec: Codec, x: NDArray[np.float32]) -> None:
    data = reference.encode(codec, x)
    assert data is not None
    decoded = decode(codec, memoryview(data), x.size, torch.float32, GPU)
    assert decoded.device == GPU
    assert decoded.cpu().numpy().tobytes() == reference.decode(codec, data, x.size).tobytes()


@each_codec
@each_dtype
def test_large_tensors_of_every_dtype_as_on_the_cpu(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(MANY, np.float32)).to(dtype)
    here, there = encode(codec, x), encode(codec, x.to(GPU))
    assert there.codec is codec
    assert len(there.data) == encoded_bytes(codec, MANY, dtype)
    assert here.data == there.data
    decoded = decode(codec, there.data, MANY, dtype, GPU)
    assert torch.equal(decoded.cpu(), decode(codec, here.data, MANY, dtype, torch.device("cpu")))


@each_quantising
@each_dtype
def test_a_tensor_that_is_not_finite_is_sent_as_raw16_and_marked_so(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.ones(5000, dtype=dtype, device=GPU)
    x[100], x[2000], x[4999] = float("nan"), float("inf"), -float("inf")
    encoded = encode(codec, x)
    assert encoded.codec is Codec.RAW16
    decoded = decode(encoded.codec, encoded.data, 5000, dtype, GPU)
    torch.testing.assert_close(decoded, x, rtol=0, atol=0, equal_nan=True)
    assert encode(codec, torch.ones(5000, dtype=dtype, device=GPU)).codec is codec


@each_quantising
def test_a_scale_that_no_encoder_writes_is_refused(codec: Codec) -> None:
    data = bytearray(encode(codec, torch.ones(1000, device=GPU)).data)
    data[-2:] = b"\xc0\x7f"
    with pytest.raises(ValueError, match="0x7fc0"):
        decode(codec, memoryview(data), 1000, torch.float32, GPU)


@each_codec
def test_encodes_results_that_the_stream_has_yet_to_compute(codec: Codec, stream: torch.cuda.Stream) -> None:
    expected = bytes(encode(codec, torch.full((MANY,), 3.0)).data)
    with torch.cuda.stream(stream):
        x = torch.zeros(MANY, device=GPU)
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        x.fill_(3.0)
        assert bytes(encode(codec, x).data) == expected


@each_codec
def test_decoded_tensors_are_ready_for_the_stream_although_the_host_does_not_wait(
    codec: Codec, stream: torch.cuda.Stream
) -> None:
    data = bytearray(encode(codec, torch.linspace(-1, 1, MANY)).data)
    expected = decode(codec, memoryview(bytes(data)), MANY, torch.float32, torch.device("cpu"))
    with torch.cuda.stream(stream):
        decode(codec, memoryview(data), MANY, torch.float32, GPU)  # compiles, and leaves memory to be used again
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        decoded = decode(codec, memoryview(data), MANY, torch.float32, GPU)
        data[:] = bytes(len(data))  # may change at once
        waited = stream.query()
        assert torch.equal(decoded.cpu(), expected)
    assert not waited


@each_codec
def test_pinned_memory_is_used_again_once_nothing_refers_to_it(codec: Codec) -> None:
    def address(data: memoryview) -> int:
        return int(np.frombuffer(data, np.uint8).ctypes.data)

    x = torch.linspace(-1, 1, MANY, device=GPU)
    first = encode(codec, x)
    assert torch.frombuffer(first.data, dtype=torch.uint8).is_pinned()
    held = bytes(first.data)
    second = encode(codec, -x)
    assert address(second.data) != address(first.data)
    assert bytes(first.data) == held
    addresses = {address(first.data), address(second.data)}
    del first, second
    for _ in range(10):
        assert address(encode(codec, x).data) in addresses


@pytest.mark.parametrize("codec", [Codec.TOPK, Codec.TOP64])
def test_feedback_stays_on_the_gpu(codec: Codec) -> None:
    x = torch.linspace(-1, 1, 5000)
    here, there = encode_with_feedback(codec, x, None), encode_with_feedback(codec, x.to(GPU), None)
    assert there[1].device == GPU
    assert bytes(here[0].data) == bytes(there[0].data)
    assert torch.equal(here[1], there[1].cpu())


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 2048, 3072, 1 << 20, (1 << 27) + 1, 300_000_001])
def test_a_digest_equals_the_digest_of_the_same_bytes_on_the_host(size: int) -> None:
    x = torch.randint(0, 256, (size,), dtype=torch.uint8, device=GPU)
    assert digest(x) == digest(x.cpu())


def test_a_digest_is_taken_on_the_callers_stream(stream: torch.cuda.Stream) -> None:
    x = torch.zeros(MANY, device=GPU)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        x.fill_(1)
        assert digest(x) == digest(torch.ones(MANY))


def test_a_tensor_from_a_gpu_takes_as_many_bytes_of_pinned_memory_as_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PINNED", memory := Memory(fresh=transfer.page_locked))
    size = (3 << 20) + 4  # torch's own pinned memory would take 4 MiB
    copy = transfer.to_host(torch.ones(size, dtype=torch.uint8, device=GPU))
    assert copy.is_pinned()
    assert copy.eq(1).all()
    del copy
    assert memory.free_bytes == size
