"""The fast path on a GPU: codecs.cu, compiled by CuPy on first use and kept in its cache; equal to reference.py bit for bit.

Memory is torch's, and everything runs on torch's current stream.
"""

from __future__ import annotations

import functools
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
    """Compiles for ``device``: a second's work, where CuPy has not kept it. Raises RuntimeError where CUDA's compiler is
    missing."""
    with cupy.cuda.Device(device.index):
        _kernel("raw16_encode_float")


def encode(codec: Codec, elements: torch.Tensor, length: int) -> memoryview | None:
    """``elements``, 1-D, contiguous and on a GPU, under ``codec``, which makes ``length`` bytes of them; in pinned memory.

    None where the codec is a quantising one and ``elements`` has a NaN, an infinity or what is too large for its scales.
    """
    if not length:
        return memoryview(b"")
    flag = -(-length // 4) * 4
    encoded = torch.empty(flag + 4, dtype=torch.uint8, device=elements.device)
    refused = encoded[flag:].zero_()  # in the same piece, so that one copy brings both
    encode_into(codec, elements if elements.dtype in _TYPES else elements.float(), encoded, refused)
    copy = to_host(encoded).numpy()
    return None if copy[flag:].any() else copy[:length].data


def decode(codec: Codec, encoded: memoryview, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 1-D tensor that ``encoded``, of the right length, stands for. Waits for nothing that ``device`` does.

    Raises ValueError for a scale, or places, that no encoder writes.
    """
    check(codec, np.frombuffer(encoded, np.uint8), elements)
    decoded = torch.empty(elements, dtype=dtype if dtype in _TYPES else torch.float32, device=device)
    if elements:
        decode_into(codec, to_device(encoded, device), decoded)
    return decoded.to(dtype)


def encode_into(codec: Codec, elements: torch.Tensor, encoded: torch.Tensor, refused: torch.Tensor) -> None:
    """Encodes ``elements`` (1-D, contiguous, float32 or bfloat16, at least one) into ``encoded``.

    The address of ``encoded`` is a multiple of 8. ``refused``, four bytes at a multiple of 4, becomes other than 0 where the
    codec cannot take ``elements``.
    """
    _launch(codec, "encode", elements, elements, elements.numel(), encoded, refused)


def decode_into(codec: Codec, encoded: torch.Tensor, elements: torch.Tensor) -> None:
    """Decodes ``encoded``, whose scales and places have been checked and whose address is a multiple of 8, into ``elements``,
    as in ``encode_into``."""
    _launch(codec, "decode", elements, encoded, elements.numel(), elements)


def _launch(codec: Codec, direction: str, elements: torch.Tensor, *arguments: torch.Tensor | int) -> None:
    device = elements.device
    words = [np.uint64(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments]
    thread_blocks = -(-elements.numel() // _ELEMENTS)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        kernel = _kernel(f"{codec.name.lower()}_{direction}_{_TYPES[elements.dtype]}")
        kernel((thread_blocks,), (_THREADS,), tuple(words))


@functools.cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)


@functools.cache
def _module() -> Any:
    source = resources.files("dtfm.kernels").joinpath("codecs.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))
