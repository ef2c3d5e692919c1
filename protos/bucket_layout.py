"""What lies where in a bucket's file: the names, types and shapes of its tensors.

Digests of the state say nothing of these, so that whoever writes a file could exchange two tensors of one shape. The run's
description has a digest of each bucket's layout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from blake3 import blake3

LAYOUT_BYTES = 16
"""Of a layout's digest."""

LENGTH_BYTES = 8
"""Of the header's length, little-endian, with which a safetensors file begins."""

MOST_HEADER_BYTES = 1 << 20
"""Of a bucket's file."""

MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
"""The names of the optimizer's state in a bucket's file, after the parameters. A file of weights alone lacks them."""


def layout_digest(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Of the tensors' names, types (as safetensors names them) and shapes, in the order in which their bytes lie."""
    said = json.dumps([[name, dtype, list(shape)] for name, dtype, shape in tensors], separators=(",", ":"))
    return blake3(said.encode()).digest(LAYOUT_BYTES)


def layout_of_file(header: bytes, data_bytes: int, *, weights: bool = False) -> bytes:
    """The digest of the layout that a file has, by the text of its header, which ``data_bytes`` follow. Of one with the
    ``weights`` alone: the layout that it would have with the moments.

    Raises:
        ValueError: it is no header, or what it names does not fill these bytes without a gap.
    """
    try:
        named = json.loads(header, object_pairs_hook=_once)
        found = [
            (int(begin), int(end), str(name), str(entry["dtype"]), [int(size) for size in entry["shape"]])
            for name, entry in named.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("it is no safetensors file") from None
    found.sort(key=lambda each: each[:2])  # those without elements, which lie at one place, stay as they are named
    ends = [0, *(end for _, end, *_ in found)]
    if [begin for begin, *_ in found] != ends[:-1] or ends[-1] != data_bytes:
        raise ValueError("the tensors that its header names do not fill it")
    tensors = [(name, dtype, shape) for _, _, name, dtype, shape in found]
    if weights:
        size = sum(math.prod(shape) for _, _, shape in tensors)
        tensors += [(name, tensors[0][1] if tensors else "F32", [size]) for name in MOMENTS]
    return layout_digest(tensors)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError if a name comes twice: readers could each take another of the two."""
    if len(named := dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return named
