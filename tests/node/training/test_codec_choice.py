"""A stream is compressed only if its link is slower than computing, and no more than needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.kernels.codec import Codec
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import placement_of
from dtfm.node.training.codec_choice import MARGIN, choose_codec, choose_codecs
from dtfm.node.transport.frame_validation import TensorSizes
from dtfm.protos.frame import Kind
from dtfm.protos.plan_pb2 import Run
from dtfm.scheduler.model.plan import Stage, from_routes

ELEMENTS = 1_000_000  # 4 MB of fp32
PLAN = from_routes(
    1,
    [Stage((0, 1), ("a",), ()), Stage((1, 2), ("me", "twin"), ()), Stage((2, 3), ("z",), ())],
    [(("a", "me", "z"), 4), (("a", "twin", "z"), 4)],
)


@pytest.mark.parametrize(
    ("bandwidth", "codec"),
    [
        (float("inf"), Codec.OFF),
        (4e6, Codec.OFF),
        (3.9e6, Codec.RAW16),
        (2e6, Codec.RAW16),
        (1.9e6, Codec.I8B256),
        (1.0, Codec.I8B256),
    ],
)
def test_auto_takes_the_gentlest_codec_whose_transfer_is_hidden(bandwidth: float, codec: Codec) -> None:
    assert choose_codec("auto", ELEMENTS, torch.float32, bandwidth, seconds=1.0) is codec


@given(
    st.floats(1e5, 1e8),
    st.lists(st.floats(1 / MARGIN**0.49, MARGIN**0.49), min_size=1, max_size=20),
)
def test_a_wavering_bandwidth_does_not_change_the_codec(bandwidth: float, wavering: list[float]) -> None:
    codec, seen = None, set()
    for factor in wavering:
        codec = choose_codec("auto", ELEMENTS, torch.float32, bandwidth * factor, 1.0, codec)
        seen.add(codec)
    assert len(seen) == 1


@given(st.sampled_from([None, *Codec]), st.floats(1e5, 1e8))
def test_a_codec_that_is_right_by_the_margin_replaces_another(previous: Codec | None, bandwidth: float) -> None:
    right = choose_codec("auto", ELEMENTS, torch.float32, bandwidth, 1.0)
    beyond = [choose_codec("auto", ELEMENTS, torch.float32, bandwidth * by, 1.0) for by in (MARGIN, 1 / MARGIN)]
    assert choose_codec("auto", ELEMENTS, torch.float32, bandwidth, 1.0, previous) in (right, previous)
    if beyond == [right, right]:
        assert choose_codec("auto", ELEMENTS, torch.float32, bandwidth, 1.0, previous) is right


def test_a_named_codec_is_taken_as_it_is() -> None:
    assert choose_codec("off", ELEMENTS, torch.float32, 1.0, 1.0) is Codec.OFF
    assert choose_codec("i8b256", ELEMENTS, torch.float32, float("inf"), 1.0, Codec.OFF) is Codec.I8B256
    with pytest.raises(ValueError, match="there is no codec 'zip'"):
        choose_codec("zip", ELEMENTS, torch.float32, 1.0, 1.0)


def test_each_link_has_its_own_codec_and_a_group_has_one() -> None:
    placement = placement_of(PLAN, "me", 0, [BucketSpec(1, (1,), ())])
    assert placement is not None
    codecs = choose_codecs(
        Run.Network(activations="auto", gradients="auto", reduction="auto"),
        placement,
        TensorSizes(ELEMENTS, ELEMENTS, {1: ELEMENTS}, torch.float32, torch.float32),
        bandwidth={"a": 1e6, "z": 1e9, "twin": 3e6},
        micro_batch_seconds=1.0,
        previous=None,
    )
    assert codecs.of(Kind.ACTIVATION, "z") is Codec.OFF
    assert codecs.of(Kind.GRADIENT, "a") is Codec.I8B256
    # The twin gets 4 MB, at 3 MB/s. Of the four micro-batches' 4 s only the last backward's 0.67 s hide the transfer, and 0.08 s
    # more do no harm: 2.2 MB fit, so 16 bits are enough.
    assert codecs.of(Kind.REDUCE, "twin") is Codec.RAW16
    assert codecs.of(Kind.GATHER, "twin") is Codec.RAW16
    assert str(codecs) == "activations to z off, gradients to a i8b256, reduction to twin raw16"
