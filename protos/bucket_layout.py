"""How a bucket's file begins. All nodes write the same header, which names what lies where in it.

Digests of the state say nothing of these names, so that whoever writes a file could exchange two tensors of one shape. The run's
description has digests of each bucket's headers."""

from __future__ import annotations

from blake3 import blake3

LAYOUT_BYTES = 32
"""Of what is said of a bucket: the digest of the layout of its file, and of the file that has the weights alone."""

LENGTH_BYTES = 8
"""Of the header's length, little-endian, with which a safetensors file begins."""

MOST_HEADER_BYTES = 1 << 20
"""Of a bucket's file."""

OPTIMIZER = "optimizer."
"""Begins the names of what is not the model's in a bucket's file."""

MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
"""The names of the optimizer's state in a bucket's file, after the parameters. A file of weights alone lacks them."""

MOMENTUM = "optimizer.outer_momentum"
"""After them, where exchanges of islands have momentum in this run."""


def layout_digest(header: bytes, data_bytes: int) -> bytes:
    """Of a file with this header, without its length, which ``data_bytes`` follow."""
    return blake3(data_bytes.to_bytes(8, "little") + header).digest(LAYOUT_BYTES // 2)
