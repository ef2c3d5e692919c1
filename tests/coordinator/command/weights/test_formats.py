"""Numbers in other formats, against PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.coordinator.command.weights.converting import converted

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.99, 65520.0, 1e-8, 6e-8, 1e-45, 3.3895e38, 3.4e38, np.inf, -np.inf]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("source", ["F64", "F32"])
@given(values=st.lists(st.floats(allow_nan=False) | st.sampled_from(EDGES), max_size=20))
def test_they_round_as_in_pytorch(source: str, target: str, values: list[float]) -> None:
    before = torch.tensor(values, dtype=torch.float64).to(TORCH[source])
    expected = before.to(torch.float32).to(TORCH[target])
    made, infinite = converted(bits(before), source, target)
    assert made == bits(expected)
    assert infinite == int((expected.isinf() & before.isfinite()).sum())


@given(st.binary(min_size=4, max_size=64).map(lambda data: data[: len(data) // 4 * 4]))
def test_any_bits_do_and_what_is_no_number_stays_none(data: bytes) -> None:
    before = torch.frombuffer(bytearray(data), dtype=torch.float32)
    for target in ("F16", "BF16"):
        made, _ = converted(data, "F32", target)
        after = torch.frombuffer(bytearray(made), dtype=TORCH[target])
        assert torch.equal(after.isnan(), before.isnan())
        real = ~before.isnan()
        assert torch.equal(after[real], before[real].to(TORCH[target]))


def test_of_two_equally_near_numbers_the_even_one_is_taken() -> None:
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    made, _ = converted(halfway.tobytes(), "F32", "BF16")
    assert np.frombuffer(made, np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_no_number_is_not_rounded_to_an_infinite_one() -> None:
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    made, infinite = converted(payloads.tobytes(), "F32", "BF16")
    assert torch.frombuffer(bytearray(made), dtype=torch.bfloat16).isnan().all()
    assert infinite == 0


def test_sixteen_bits_become_more_without_a_loss() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for source in ("F16", "BF16"):
        before = torch.frombuffer(bytearray(every.tobytes()), dtype=TORCH[source])
        made, infinite = converted(every.tobytes(), source, "F32")
        after = torch.frombuffer(bytearray(made), dtype=torch.float32)
        assert torch.equal(after.nan_to_num(), before.float().nan_to_num())
        assert infinite == 0
