"""How a bucket's file begins. All nodes write the same header, which names what lies where in it.

Digests of the state say nothing of these names, so that whoever writes a file could exchange two tensors of one shape. The run's
description has digests of each bucket's headers."""

from __future__ import annotations

import json

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


FURTHER_NAMES = "further_names"
"""In the header's metadata, a JSON list: peft has a copy of the file's only parameter under each of these names too."""


def further_names(header: bytes | str) -> tuple[str, ...]:
    """Those in the ``header``, without its length. Raises ValueError, AttributeError or TypeError if it is no header."""
    metadata = json.loads(header).get("__metadata__") or {}
    return tuple(map(str, json.loads(metadata.get(FURTHER_NAMES, "[]"))))


def layout_digest(header: bytes, data_bytes: int) -> bytes:
    """Of a file with this header, without its length, which ``data_bytes`` follow."""
    return blake3(data_bytes.to_bytes(8, "little") + header).digest(LAYOUT_BYTES // 2)
