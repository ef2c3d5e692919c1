"""The bytes that eight islands of one node each send in an exchange."""

from __future__ import annotations

import pytest
import torch

from dtfm.kernels.codec import Codec, encoded_bytes
from dtfm.node.model.placement import pieces
from dtfm.protos.frame import Header, frames
from tests.node.training.reduction.together import group, reduce_together

NODES = "abcdefgh"


def sent(codec: Codec) -> int:
    """By all nodes, with the headers of all frames, in an exchange of a small bucket."""
    sizes: list[int] = []
    changes = {
        node: {0: torch.randn(1 << 19, generator=torch.Generator().manual_seed(n))} for n, node in enumerate(NODES)
    }

    def sends(header: Header, encoded: memoryview) -> None:
        assert header.codec == codec
        sizes.extend(map(len, frames(header, encoded)))

    reduce_together(changes, {0: group(*NODES)}, codec, sends=sends)
    assert all(torch.equal(changes[node][0], changes["a"][0]) for node in NODES)
    return sum(sizes)


def test_sparse_codecs_send_less_than_i4b64_and_top64_less_than_a_sixth() -> None:
    dense = sent(Codec.I4B64)
    assert sent(Codec.TOPK) / dense == pytest.approx(0.53, abs=0.01)
    assert sent(Codec.TOP64) < dense / 6


def test_of_a_large_bucket_top64_sends_hardly_more_than_its_blocks_have() -> None:
    """Pieces do not end with blocks. Each node sends all to seven others; under i4b64 a shard to each, and the sum of its own."""
    ranges = [stop - start for start, stop in pieces(44_040_193, 8)]
    sparse = 7 * sum(encoded_bytes(Codec.TOP64, size, torch.float32) for size in ranges)
    dense = 7 / 8 * 2 * sum(encoded_bytes(Codec.I4B64, size, torch.float32) for size in ranges)
    assert sparse / dense == pytest.approx(0.1544, abs=0.0003)
