"""The codecs and BLAKE3 on a GPU: codecs.cu, sparse.cu and digest.cu, compiled and cached by CuPy on first use. The codecs equal
tests/kernels/reference.py bit for bit.

Memory is torch's: CuPy allocates nothing, and torch's allocator hands out freed memory again. Everything runs on torch's
current stream. Only ``encode`` and ``digest`` wait, until their own bytes are on the host.
"""

from __future__ import annotations

import functools
import itertools
from importlib import resources
from typing import Any

import cupy
import numpy as np
import torch

from dtfm.kernels.layout import BLOCKS, Codec, check
from dtfm.kernels.transfer import to_device, to_host

# As in the files that are compiled.
_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_THREADS, _WARPS = 256, 8  # per thread block
_TILE = 256  # elements per warp, or a block of a codec if that is larger
CHUNK_BYTES = 1024
_VALUE_BYTES = 32

SEGMENT_CHUNKS = 1 << 17
"""A power of two: the number of chunks whose tree is reduced to its top before the next chunks begin. It bounds the memory to 6
MiB."""


def prepare(device: torch.device) -> None:
    """Compiles the kernels for ``device``, which takes a second unless CuPy has them cached. Then loads them all now, because
    the driver may wait for the whole device while it loads a kernel. Raises the exceptions of CuPy."""
    with cupy.cuda.Device(device.index):
        for codec, direction, kind in itertools.product(Codec, ("encode", "decode"), _TYPES.values()):
            if codec is not Codec.OFF:
                _kernel(_file(codec), _name(codec, direction, kind))
        for name in ("chunk_values", "parent_values"):
            _kernel("digest.cu", name)


def encode(codec: Codec, elements: torch.Tensor, length: int) -> memoryview | None:
    """Encodes ``elements`` (1-D, contiguous, on a GPU) to ``length`` bytes in pinned memory.

    Returns None when the codec is a quantising one and ``elements`` contains a NaN, an infinity or a value too large
    for its scales.
    """
    if not length:
        return memoryview(b"")
    flag = -(-length // 4) * 4
    encoded = torch.empty(flag + 4, dtype=torch.uint8, device=elements.device)
    refused = encoded[flag:].zero_()  # in the same tensor, so that one copy transfers both
    encode_into(codec, elements if elements.dtype in _TYPES else elements.float(), encoded, refused)
    copy = to_host(encoded).numpy()
    return None if copy[flag:].any() else copy[:length].data


def decode(codec: Codec, encoded: memoryview, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Decodes ``encoded``, which has the right length, to a 1-D tensor, without waiting for ``device``.

    Raises ValueError for scales or places that no encoder writes.
    """
    check(codec, np.frombuffer(encoded, np.uint8), elements)
    decoded = torch.empty(elements, dtype=dtype if dtype in _TYPES else torch.float32, device=device)
    if elements:
        decode_into(codec, to_device(encoded, device), decoded)
    return decoded.to(dtype)


def encode_into(codec: Codec, elements: torch.Tensor, encoded: torch.Tensor, refused: torch.Tensor) -> None:
    """Encodes ``elements`` (1-D, contiguous, float32 or bfloat16, at least one) into ``encoded``.

    The address of ``encoded`` must be a multiple of 8. ``refused``, four bytes at a multiple of 4, becomes nonzero
    when the codec cannot encode ``elements``.
    """
    _launch_codec(codec, "encode", elements, elements, elements.numel(), encoded, refused)


def decode_into(codec: Codec, encoded: torch.Tensor, elements: torch.Tensor) -> None:
    """Decodes ``encoded`` into ``elements``, as in ``encode_into``.

    The scales and places must have been checked, and the address of ``encoded`` must be a multiple of 8.
    """
    _launch_codec(codec, "decode", elements, encoded, elements.numel(), elements)


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
        _launch("digest.cu", "chunk_values", -(-count // _THREADS), part, part.numel(), first, values)
        top = _reduced(values, count, is_all=segments == 1)
        tops[segment * _VALUE_BYTES : (segment + 1) * _VALUE_BYTES].copy_(top)
    return to_host(_reduced(tops, segments, is_all=True)).numpy().tobytes()


def _reduced(values: torch.Tensor, count: int, *, is_all: bool) -> torch.Tensor:
    """The top value of the tree above ``count`` values; with ``is_all`` it is the root's."""
    above = torch.empty(-(-count // 2) * _VALUE_BYTES, dtype=torch.uint8, device=values.device)
    while count > 1:
        parents = -(-count // 2)
        _launch(
            "digest.cu", "parent_values", -(-parents // _THREADS), values, count, int(is_all and parents == 1), above
        )
        values, above, count = above, values, parents
    return values[:_VALUE_BYTES]


def _launch_codec(codec: Codec, direction: str, elements: torch.Tensor, *arguments: torch.Tensor | int) -> None:
    name = _name(codec, direction, _TYPES[elements.dtype])
    tile = max(_TILE, BLOCKS[codec].block) if codec in BLOCKS else _TILE
    _launch(_file(codec), name, -(-elements.numel() // (_WARPS * tile)), *arguments)


def _launch(file: str, name: str, thread_blocks: int, *arguments: torch.Tensor | int) -> None:
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    words = tuple(np.uint64(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        _kernel(file, name)((thread_blocks,), (_THREADS,), words)


def _file(codec: Codec) -> str:
    return "sparse.cu" if codec.sparse else "codecs.cu"


def _name(codec: Codec, direction: str, kind: str) -> str:
    return f"{codec.name.lower()}_{direction}_{kind}"


@functools.cache
def _kernel(file: str, name: str) -> Any:
    return _module(file).get_function(name)


@functools.cache
def _module(file: str) -> Any:
    texts = (file,) if file == "digest.cu" else ("elements.cu", file)
    source = "".join(resources.files("dtfm.kernels").joinpath(text).read_text(encoding="utf-8") for text in texts)
    return cupy.RawModule(code=source, options=("-std=c++17",))
