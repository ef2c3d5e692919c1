"""Error feedback: changes that one exchange leaves out are sent in later ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dtfm.kernels.codec import KEPT, Codec, decode, encode_with_feedback
from tests.kernels.arrays import float32

CPU = torch.device("cpu")
QUANTISING = [Codec.I8B256, Codec.I4B64, Codec.TOPK, Codec.TOP64]


@pytest.mark.parametrize("codec", QUANTISING)
@given(x=float32(special=(0.0, -1.0)), seed=st.integers(0, 2**32))
def test_the_residual_is_the_input_minus_the_output(codec: Codec, x: NDArray[np.float32], seed: int) -> None:
    gradients = torch.from_numpy(x)
    carried = torch.from_numpy(np.random.default_rng(seed).standard_normal(x.size).astype(np.float32))
    encoded, residual = encode_with_feedback(codec, gradients, carried)
    received = decode(encoded.codec, encoded.data, x.size, torch.float32, CPU)
    assert torch.equal(residual, (gradients + KEPT * carried) - received)


@pytest.mark.parametrize(("codec", "turn"), [(Codec.TOPK, 32), (Codec.TOP64, 64)])
def test_all_elements_are_sent_in_time(codec: Codec, turn: int) -> None:
    """Each exchange sends the largest of each ``turn`` elements. So constant changes all have their turn in about that many
    exchanges."""
    changes, arrived = (
        torch.from_numpy(np.random.default_rng(0).uniform(0.98, 1.0, 8192).astype(np.float32)),
        torch.zeros(8192),
    )
    carried: torch.Tensor | None = None
    for _ in range(2 * turn):
        encoded, carried = encode_with_feedback(codec, changes, carried)
        assert encoded.codec is codec
        arrived += decode(encoded.codec, encoded.data, 8192, torch.float32, CPU)
    assert arrived.count_nonzero() == 8192


def test_a_step_that_is_not_finite_leaves_no_residual() -> None:
    gradients = torch.ones(300)
    gradients[7], gradients[8] = float("nan"), float("inf")
    encoded, residual = encode_with_feedback(Codec.TOPK, gradients, None)
    assert encoded.codec is Codec.RAW16
    assert torch.equal(residual, torch.zeros(300))


def test_gradients_of_any_shape_and_dtype_and_the_carried_residual_stay_unchanged() -> None:
    gradients = torch.linspace(-1, 1, 600, dtype=torch.bfloat16).view(20, 30)
    carried = torch.linspace(0, 1, 600)
    before = gradients.clone(), carried.clone()
    _, residual = encode_with_feedback(Codec.TOPK, gradients, carried)
    assert residual.shape == (600,)
    assert torch.equal(gradients, before[0])
    assert torch.equal(carried, before[1])
