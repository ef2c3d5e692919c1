"""The node's command with links of unlike speeds: ``python -m tests.bench.unlike join ...``.

On loopback all links are very fast, and ``compression = "auto"`` compresses nothing. Here a node believes that its links have
three speeds. For these it chooses three codecs: off, raw16 and i8b256. The speed of a link follows from the names of its two
nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from unittest import mock

from dtfm.kernels.codec import encoded_bytes
from dtfm.node import cli
from dtfm.node.model.placement import Placement
from dtfm.node.training import codec_choice
from dtfm.node.training.codec_choice import GENTLEST_FIRST, Codecs, choose_codecs
from dtfm.node.transport.frame_validation import TensorSizes
from dtfm.protos.plan_pb2 import Run

MIDDLE = 0.75
"""A fraction of the bandwidth that just hides an uncompressed tensor: enough for half of its bytes."""


def speeds(node: str, peers: Collection[str], hidden: float) -> Mapping[str, float]:
    """Bytes per second by peer. ``hidden``: the speeds that just hide an uncompressed tensor."""
    of_class = (float("inf"), MIDDLE * hidden, 1.0)
    return {peer: of_class[zlib.crc32(f"{node} to {peer}".encode()) % len(of_class)] for peer in peers}


def unlike(
    network: Run.Network,
    placement: Placement,
    sizes: TensorSizes,
    *,
    bandwidth: Mapping[str, float],
    micro_batch_seconds: float,
    previous: Codecs | None,
) -> Codecs:
    elements = min(size for size in (sizes.input, sizes.output) if size)  # logits are larger, and stay
    uncompressed = encoded_bytes(GENTLEST_FIRST[0], elements, sizes.dtype)
    believed = speeds(placement.node, placement.peers, uncompressed / micro_batch_seconds)
    return choose_codecs(
        network, placement, sizes, bandwidth=believed, micro_batch_seconds=micro_batch_seconds, previous=previous
    )


def main() -> None:
    with mock.patch.object(codec_choice, "choose_codecs", unlike):
        cli.main()


if __name__ == "__main__":
    main()
