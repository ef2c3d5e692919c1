"""BLAKE3 on a GPU: digest.cu, compiled and cached by CuPy on first use. Memory and streams as in gpu.py."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import cupy
import numpy as np
import torch

from dtfm.kernels.transfer import to_host

# As in digest.cu.
CHUNK_BYTES = 1024
_VALUE_BYTES = 32
_THREADS = 256

SEGMENT_CHUNKS = 1 << 17
"""A power of two: chunks whose tree is reduced to its top before the next ones are begun, which bounds the memory to 6 MiB."""


def prepare(device: torch.device) -> None:
    """As gpu.prepare."""
    with cupy.cuda.Device(device.index):
        for name in ("chunk_values", "parent_values"):
            _kernel(name)


def digest(data: torch.Tensor) -> bytes:
    """BLAKE3 (32 bytes) of ``data`` (1-D uint8, contiguous, more than CHUNK_BYTES, at an address that is a multiple of 16).

    Waits, without spinning, for the current stream.
    """
    chunks = -(-data.numel() // CHUNK_BYTES)
    segments = -(-chunks // SEGMENT_CHUNKS)
    tops = torch.empty(segments * _VALUE_BYTES, dtype=torch.uint8, device=data.device)
    values = torch.empty(min(chunks, SEGMENT_CHUNKS) * _VALUE_BYTES, dtype=torch.uint8, device=data.device)
    for segment in range(segments):
        first = segment * SEGMENT_CHUNKS
        part = data[first * CHUNK_BYTES : (first + SEGMENT_CHUNKS) * CHUNK_BYTES]
        count = -(-part.numel() // CHUNK_BYTES)
        _launch("chunk_values", count, part, part.numel(), first, values)
        top = _reduced(values, count, is_all=segments == 1)
        tops[segment * _VALUE_BYTES : (segment + 1) * _VALUE_BYTES].copy_(top)
    return to_host(_reduced(tops, segments, is_all=True)).numpy().tobytes()


def _reduced(values: torch.Tensor, count: int, *, is_all: bool) -> torch.Tensor:
    """The one value above ``count`` values; with ``is_all`` it is the root's."""
    above = torch.empty(-(-count // 2) * _VALUE_BYTES, dtype=torch.uint8, device=values.device)
    while count > 1:
        parents = -(-count // 2)
        _launch("parent_values", parents, values, count, int(is_all and parents == 1), above)
        values, above, count = above, values, parents
    return values[:_VALUE_BYTES]


def _launch(name: str, threads: int, *arguments: torch.Tensor | int) -> None:
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    words = tuple(np.uint64(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        _kernel(name)((-(-threads // _THREADS),), (_THREADS,), words)


@functools.cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)


@functools.cache
def _module() -> Any:
    source = resources.files("dtfm.kernels").joinpath("digest.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))
