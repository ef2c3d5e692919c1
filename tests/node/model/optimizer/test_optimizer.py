"""Our AdamW follows torch's, in operations that round the same on every device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtfm.kernels.adamw import Floats
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.optimizer import optimizer
from dtfm.node.model.optimizer.optimizer import CPU_CHUNK, Terms, adamw, squared_norms, terms_of
from dtfm.protos.clipping import clip_coefficient
from dtfm.protos.control_pb2 import Commit
from dtfm.protos.plan_pb2 import Run
from tests.node.allocated import most_allocated

TRAIN = Run.Train(
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
)
CLIP_NORM, WEIGHT_DECAY = 1.0, 0.1


def test_it_follows_torch_adamw_with_clipping_and_with_decay_on_most_matrices_only() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.randn(300, 300, dtype=torch.float64), torch.randn(77, dtype=torch.float64)
    rates = torch.randn(10, 8, dtype=torch.float64)  # as Mamba's A_log: a matrix that does not decay
    shapes = (("matrix", (300, 300)), ("vector", (77,)), ("rates", (10, 8)))
    bucket = Bucket(BucketSpec(0, (0,), shapes, kept=frozenset({"rates"})), torch.device("cpu"), torch.float64)
    bucket.parameters.copy_(torch.cat([matrix.flatten(), vector, rates.flatten()]))
    theirs = [torch.nn.Parameter(each.clone()) for each in (matrix, vector, rates)]
    optimizer = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(1, 21):
        gradients = torch.randn_like(bucket.parameters) * 0.1
        for parameter, piece in zip(theirs, torch.split(gradients, [90_000, 77, 80]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0).item()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / step
        optimizer.step()
        terms = Terms(clip_coefficient(norm, CLIP_NORM), 1e-3 / step, WEIGHT_DECAY)
        adamw(TRAIN, step, terms, bucket, gradients)
    expected = torch.cat([p.detach().flatten() for p in theirs])
    torch.testing.assert_close(bucket.parameters, expected, rtol=1e-12, atol=1e-14)


def rounded_one_by_one(
    terms: dict[str, float], p: Floats, g: Floats, m: Floats, v: Floats
) -> tuple[Floats, Floats, Floats]:
    """The same in NumPy, whose operations are all rounded as IEEE 754 has it."""
    keep, clip, to_mean, to_root, rate, beta1, beta2, epsilon, add1, add2 = (
        p.dtype.type(terms[name])
        for name in ("keep", "clip", "to_mean", "to_root", "rate", "beta1", "beta2", "epsilon", "add1", "add2")
    )
    g = g * clip
    m, v = m * beta1 + g * add1, v * beta2 + (g * g) * add2
    return p * keep - (m * to_mean) / (np.sqrt(v) * to_root + epsilon) * rate, m, v


@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    threads=st.sampled_from([1, 3]),
    step=st.integers(1, 1000),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e6]),
)
def test_on_the_host_every_operation_is_rounded_by_itself(
    rows: int, columns: int, dtype: torch.dtype, threads: int, step: int, scale: float
) -> None:
    """So that a GPU, which does them one after the other, has the same bits. PyTorch's square root on a CPU is not exact."""
    some = torch.Generator().manual_seed(rows * columns + step)
    spec = BucketSpec(0, (0,), (("matrix", (rows, columns)), ("vector", (columns,))))
    bucket = Bucket(spec, torch.device("cpu"), dtype)
    for tensor in bucket.state:
        tensor.copy_(torch.rand(tensor.shape, generator=some, dtype=torch.float64))
    gradients = torch.randn(spec.size, generator=some, dtype=torch.float64).mul(scale).to(dtype)
    before = [tensor.numpy().copy() for tensor in (bucket.parameters, gradients, *bucket.moments)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "HOST_CHUNK", 256)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        adamw(TRAIN, step, Terms(0.4, 1e-3, WEIGHT_DECAY), bucket, gradients)
    terms = {
        "clip": 0.4,
        "to_mean": 1 / (1 - TRAIN.beta1**step),
        "to_root": 1 / math.sqrt(1 - TRAIN.beta2**step),
        "rate": 1e-3,
        "epsilon": TRAIN.epsilon,
        **{"beta1": TRAIN.beta1, "add1": 1 - TRAIN.beta1, "beta2": TRAIN.beta2, "add2": 1 - TRAIN.beta2},
    }
    for part, keep in ((slice(0, rows * columns), 1 - 1e-3 * WEIGHT_DECAY), (slice(rows * columns, None), 1.0)):
        expected = rounded_one_by_one({**terms, "keep": keep}, *(array[part] for array in before))
        for found, wanted in zip(bucket.state, expected, strict=True):
            assert found[part].numpy().tobytes() == wanted.tobytes()


def test_a_bucket_is_clipped_as_the_first_of_its_layers_in_its_island() -> None:
    """Layer 3 uses a parameter of layer 0: both stages must apply the same to it."""
    clips = [
        Commit.Clip(island=island, first_layer=first, past_last_layer=first + 2, factor=island + 0.1 * first)
        for island in (1, 2)
        for first in (0, 2)
    ]
    commit = Commit(step=7, learning_rate=1e-3, weight_decay=0.1, clips=clips)
    assert terms_of(commit, BucketSpec(3, (3,), ()), island=2) == Terms(2.2, 1e-3, 0.1)
    assert terms_of(commit, BucketSpec(4, (3, 0), ()), island=2) == Terms(2.0, 1e-3, 0.1)
    assert terms_of(commit, BucketSpec(3, (3,), ())) == Terms(1.2, 1e-3, 0.1)
    with pytest.raises(ValueError, match="the commit of step 7 says nothing of layer 4 in island 2"):
        terms_of(commit, BucketSpec(4, (4,), ()), island=2)


@given(size=st.integers(0, 3 * CPU_CHUNK), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=settings().max_examples // 2)
def test_a_squared_norm_is_that_of_all_elements_in_float64(size: int, dtype: torch.dtype) -> None:
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert squared_norms([flat]) == pytest.approx([math.fsum(x * x for x in flat.tolist())], rel=1e-12)


def test_a_norm_and_an_update_take_little_memory_beside_the_bucket() -> None:
    bucket = Bucket(BucketSpec(0, (0,), (("matrix", (40, CPU_CHUNK)),)), torch.device("cpu"), torch.float32)
    bucket.gradients.fill_(1)
    assert bucket.moments

    def update() -> None:
        norm = math.sqrt(*squared_norms([bucket.gradients]))
        terms = Terms(clip_coefficient(norm, CLIP_NORM), 1e-3, WEIGHT_DECAY)
        adamw(TRAIN, 1, terms, bucket, bucket.gradients)

    assert 0 < most_allocated(update) <= 8 * 4 * CPU_CHUNK
