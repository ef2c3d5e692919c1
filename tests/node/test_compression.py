"""Compression only where the link is slower than the computing, and never more of it than needed."""

from __future__ import annotations

import pytest
import torch

from dtfm.kernels.codec import Codec
from dtfm.node.compression import choose_codec, choose_codecs
from dtfm.node.share import Group, share_of
from dtfm.protos.frame import Kind
from dtfm.protos.plan_pb2 import Plan, Run

ELEMENTS = 1_000_000  # 4 MB of fp32
PLAN = Plan(
    generation=1,
    stages=[
        Plan.Stage(first_layer=0, past_last_layer=1, replicas=["a"]),
        Plan.Stage(first_layer=1, past_last_layer=2, replicas=["me", "twin"]),
        Plan.Stage(first_layer=2, past_last_layer=3, replicas=["z"]),
    ],
    routes=[
        Plan.Route(nodes=["a", "me", "z"], micro_batches=4),
        Plan.Route(nodes=["a", "twin", "z"], micro_batches=4),
    ],
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
def test_auto_takes_the_gentlest_codec_that_hides_under_the_computing(bandwidth: float, codec: Codec) -> None:
    assert choose_codec("auto", ELEMENTS, torch.float32, bandwidth, seconds=1.0) is codec


def test_a_named_codec_is_taken_as_it_is() -> None:
    assert choose_codec("off", ELEMENTS, torch.float32, 1.0, 1.0) is Codec.OFF
    assert choose_codec("i8b256", ELEMENTS, torch.float32, float("inf"), 1.0) is Codec.I8B256
    with pytest.raises(ValueError, match="there is no codec 'zip'"):
        choose_codec("zip", ELEMENTS, torch.float32, 1.0, 1.0)


def test_each_link_has_its_own_codec_and_a_group_has_one() -> None:
    share = share_of(PLAN, "me", 0)
    assert share is not None
    codecs = choose_codecs(
        Run.Network(activations="auto", gradients="auto", reduction="auto"),
        share,
        {1: Group(("me", "twin"), ("me", "twin"))},
        {1: ELEMENTS},
        input_elements=ELEMENTS,
        output_elements=ELEMENTS,
        dtype=torch.float32,
        bandwidth={"a": 1e6, "z": 1e9, "twin": 0.6e6},
        micro_batch_seconds=1.0,
    )
    assert codecs.of(Kind.ACTIVATION, "z") is Codec.OFF
    assert codecs.of(Kind.GRADIENT, "a") is Codec.I8B256
    # 4 MB go to the twin within the four micro-batches' 4 s at 0.6 MB/s: 2.4 MB fit, so 16 bits do.
    assert codecs.of(Kind.REDUCE, "twin") is Codec.RAW16
    assert codecs.of(Kind.GATHER, "twin") is Codec.RAW16
