"""The codecs on a GPU: codecs.cu, compiled and cached by CuPy on first use, equal to tests/kernels/reference.py bit for bit.

Memory is torch's: CuPy allocates nothing, and torch's allocator hands out again what was freed. Everything runs on torch's
current stream. Only ``encode`` waits, for its own bytes to be on the host.
"""

from __future__ import annotations

import functools
import itertools
from importlib import resources
from typing import Any

import cupy
import numpy as np
import torch

from dtfm.kernels.layout import Codec, check
from dtfm.kernels.transfer import to_device, to_host

# As in codecs.cu.
_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_THREADS = 256
_ELEMENTS = 8 * _THREADS  # per thread block


def prepare(device: torch.device) -> None:
    """Compiles the kernels for ``device``, which takes a second unless CuPy has them cached, and loads them all: the driver may
    wait for the whole device while it loads one. Raises what CuPy does.
    """
    with cupy.cuda.Device(device.index):
        for codec, direction, kind in itertools.product(Codec, ("encode", "decode"), _TYPES.values()):
            if codec is not Codec.OFF:
                _kernel(_name(codec, direction, kind))


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
    _launch(codec, "encode", elements, elements, elements.numel(), encoded, refused)


def decode_into(codec: Codec, encoded: torch.Tensor, elements: torch.Tensor) -> None:
    """Decodes ``encoded`` into ``elements``, as in ``encode_into``.

    The scales and places must have been checked, and the address of ``encoded`` must be a multiple of 8.
    """
    _launch(codec, "decode", elements, encoded, elements.numel(), elements)


def _launch(codec: Codec, direction: str, elements: torch.Tensor, *arguments: torch.Tensor | int) -> None:
    device = elements.device
    words = [np.uint64(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments]
    thread_blocks = -(-elements.numel() // _ELEMENTS)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        kernel = _kernel(_name(codec, direction, _TYPES[elements.dtype]))
        kernel((thread_blocks,), (_THREADS,), tuple(words))


def _name(codec: Codec, direction: str, kind: str) -> str:
    return f"{codec.name.lower()}_{direction}_{kind}"


@functools.cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)


@functools.cache
def _module() -> Any:
    source = resources.files("dtfm.kernels").joinpath("codecs.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))
