"""Encodes tensors to bytes and decodes them, by codec; says how many bytes each codec needs for a tensor.

Codecs other than OFF work in float32 and cast other dtypes before and after. Tensors on a GPU are encoded and decoded
there, on torch's current stream, if CuPy is installed, and otherwise on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dtfm.kernels.layout import BLOCKS, Codec
from dtfm.kernels.memory import MEMORY
from dtfm.kernels.transfer import to_device, to_host
from dtfm.kernels.with_cupy import gpu_kernels

__all__ = ["DTYPES", "DTYPE_NUMBERS", "Codec", "Encoded", "codec_named", "decode", "encode", "encoded_bytes"]

# The numbers are sent in frames: never reuse one.
DTYPES: dict[int, torch.dtype] = {1: torch.float32, 2: torch.float64, 3: torch.bfloat16, 4: torch.float16}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}

KEPT = 0.95
"""The share of the left-out changes that counts in the next exchange, as in SparseLoCo (arXiv 2508.15706): older changes fade."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor's bytes (uint8, contiguous) and the codec that made them.

    The codec is RAW16 where the requested one could not encode the tensor.
    """

    codec: Codec
    data: memoryview


def codec_named(name: str) -> Codec:
    """The codec with the run file's name ``name``, such as ``i8b256``. Raises ValueError for an unknown name."""
    try:
        return Codec[name.upper()]
    except KeyError:
        known = ", ".join(c.name.lower() for c in Codec)
        raise ValueError(f"there is no codec {name!r}; this version has {known}") from None


def encoded_bytes(codec: Codec, elements: int, dtype: torch.dtype) -> int:
    """Number of bytes of ``elements`` elements of ``dtype`` under ``codec``."""
    if codec is Codec.OFF:
        return elements * dtype.itemsize
    if codec is Codec.RAW16:
        return 2 * elements
    layout = BLOCKS[codec]
    return layout.count(elements) * layout.block_bytes


def encode(codec: Codec, tensor: torch.Tensor) -> Encoded:
    """Encodes the elements of ``tensor`` (any shape, row-major, a dtype in DTYPES) with ``codec``.

    OFF returns a view of the tensor's own memory if that is contiguous and on the CPU. A quantising codec falls back to RAW16
    for a tensor with a NaN, an infinity or a magnitude beyond its scales, so that NaNs arrive as NaNs and infinities as
    infinities.
    """
    flat = tensor.detach().contiguous().view(-1)
    if codec is Codec.OFF:
        return Encoded(codec, _on_host(flat).view(torch.uint8).numpy().data)
    for attempt in (codec, Codec.RAW16):
        data = _encode(attempt, flat)
        if data is not None:
            return Encoded(attempt, data)
    raise AssertionError("RAW16 encodes every tensor")


def _encode(codec: Codec, flat: torch.Tensor) -> memoryview | None:
    length = encoded_bytes(codec, flat.numel(), flat.dtype)
    if flat.is_cuda and (gpu := gpu_kernels(flat.device)) is not None:
        encoded: memoryview | None = gpu.encode(codec, flat, length)
        return encoded
    from dtfm.kernels import cpu  # imported here: see with_cupy.prepare

    data = MEMORY.take(length)
    return data.data if cpu.encode(codec, _on_host(flat).float().numpy(), data) else None


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    return to_host(flat) if flat.is_cuda else flat


def decode(codec: Codec, encoded: memoryview, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Decodes ``encoded`` to a 1-D tensor of ``elements`` elements; a value too large for ``dtype`` becomes infinite.

    Raises ValueError when the length does not match the codec and ``elements``, or when a block has a scale or places that no
    encoder writes (a NaN, for example). Any other bytes decode to some tensor.
    """
    if len(encoded) != encoded_bytes(codec, elements, dtype):
        raise ValueError(f"{len(encoded)} bytes cannot be {elements} elements of {dtype} under {codec.name.lower()}")
    if not elements:
        return torch.empty(0, dtype=dtype, device=device)
    if codec is Codec.OFF:
        if device.type == "cuda":
            return to_device(encoded, device).view(dtype)
        return torch.frombuffer(encoded, dtype=dtype, count=elements)
    if device.type == "cuda" and (gpu := gpu_kernels(device)) is not None:
        decoded: torch.Tensor = gpu.decode(codec, encoded, elements, dtype, device)
        return decoded
    from dtfm.kernels import cpu

    restored = MEMORY.take(4 * elements).view(np.float32)
    cpu.decode(codec, np.frombuffer(encoded, np.uint8), restored)
    return torch.from_numpy(restored).to(device, dtype)


def encode_with_feedback(
    codec: Codec, changes: torch.Tensor, carried: torch.Tensor | None
) -> tuple[Encoded, torch.Tensor]:
    """Encodes ``changes`` (any shape, n elements) plus KEPT of ``carried`` (1-D float32, n elements; None at first). So the
    part that a codec leaves out of one exchange is added to the next one's changes (error feedback, arXiv 1809.07599, algorithm
    1).

    Returns the encoded bytes to send, and the residual (1-D float32, on the changes' device): the corrected changes minus their
    decoded values, with 0 in place of NaN and infinity. Replace ``carried`` by the residual only when the exchange is
    committed: an aborted exchange has no effect.
    """
    corrected = changes.detach().reshape(-1).float()
    if carried is not None:
        corrected = corrected + KEPT * carried
    encoded = encode(codec, corrected)
    decoded = decode(encoded.codec, encoded.data, corrected.numel(), corrected.dtype, corrected.device)
    residual = torch.nan_to_num(corrected - decoded, nan=0.0, posinf=0.0, neginf=0.0)
    return encoded, residual
