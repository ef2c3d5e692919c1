"""Tensors to bytes and back, by codec; and how many bytes each codec makes of a tensor.

Codecs other than OFF work in float32: other types are cast before and after. What is on a GPU is encoded and decoded there,
on torch's current stream, where CuPy is installed, and else on the CPU.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from dtfm.kernels.layout import BLOCKS, Codec
from dtfm.kernels.memory import MEMORY
from dtfm.kernels.transfer import to_device, to_host

__all__ = ["DTYPES", "DTYPE_NUMBERS", "Codec", "Encoded", "codec_named", "decode", "encode", "encoded_bytes"]

log = logging.getLogger(__name__)

# Numbers are on the wire.
DTYPES: dict[int, torch.dtype] = {1: torch.float32, 2: torch.float64, 3: torch.bfloat16, 4: torch.float16}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor's bytes (uint8, contiguous), and the codec that made them: RAW16 where the one asked for could not."""

    codec: Codec
    data: memoryview


def codec_named(name: str) -> Codec:
    """The codec that the run file calls ``name``, e.g. ``i8b256``."""
    try:
        return Codec[name.upper()]
    except KeyError:
        known = ", ".join(c.name.lower() for c in Codec)
        raise ValueError(f"there is no codec {name!r}; this version has {known}") from None


def encoded_bytes(codec: Codec, elements: int, dtype: torch.dtype) -> int:
    """Length in bytes of ``elements`` elements of ``dtype`` under ``codec``."""
    if codec is Codec.OFF:
        return elements * dtype.itemsize
    if codec is Codec.RAW16:
        return 2 * elements
    layout = BLOCKS[codec]
    return layout.count(elements) * (layout.value_bytes + 2)


def encode(codec: Codec, tensor: torch.Tensor) -> Encoded:
    """``tensor``'s elements (any shape, row-major, a dtype of DTYPES) under ``codec``.

    OFF gives a view of the tensor's own memory where that is contiguous and on the CPU. A quantising codec leaves a tensor
    to RAW16 that holds a NaN, an infinity or a magnitude beyond bfloat16's: NaN and infinities arrive as such.
    """
    flat = tensor.detach().contiguous().view(-1)
    if codec is Codec.OFF:
        return Encoded(codec, _on_host(flat).view(torch.uint8).numpy().data)
    for attempt in (codec, Codec.RAW16):
        data = _encode(attempt, flat)
        if data is not None:
            return Encoded(attempt, data)
    raise AssertionError("RAW16 takes everything")


def _encode(codec: Codec, flat: torch.Tensor) -> memoryview | None:
    length = encoded_bytes(codec, flat.numel(), flat.dtype)
    if flat.is_cuda and (gpu := _gpu(flat.device)) is not None:
        encoded: memoryview | None = gpu.encode(codec, flat, length)
        return encoded
    from dtfm.kernels import cpu  # here, because it takes a second that a run without compression need not spend

    data = MEMORY.take(length)
    return data.data if cpu.encode(codec, _on_host(flat).float().numpy(), data) else None


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    return to_host(flat) if flat.is_cuda else flat


def decode(codec: Codec, encoded: memoryview, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 1-D tensor that ``encoded`` stands for; what exceeds ``dtype`` becomes infinite.

    Raises ValueError when the length does not fit the codec and ``elements``, or a block's scale is one that no encoder
    writes (NaN among them). Other bytes make some tensor or other.
    """
    if len(encoded) != encoded_bytes(codec, elements, dtype):
        raise ValueError(f"{len(encoded)} bytes are no {elements} elements of {dtype} under {codec.name.lower()}")
    if not elements:
        return torch.empty(0, dtype=dtype, device=device)
    if codec is Codec.OFF:
        if device.type == "cuda":
            return to_device(encoded, device).view(dtype)
        return torch.frombuffer(encoded, dtype=dtype, count=elements)
    if device.type == "cuda" and (gpu := _gpu(device)) is not None:
        decoded: torch.Tensor = gpu.decode(codec, encoded, elements, dtype, device)
        return decoded
    from dtfm.kernels import cpu

    restored = MEMORY.take(4 * elements).view(np.float32)
    cpu.decode(codec, np.frombuffer(encoded, np.uint8), restored)
    return torch.from_numpy(restored).to(device, dtype)


@functools.cache
def _gpu(device: torch.device) -> ModuleType | None:
    """The path for what is on ``device``, a GPU; None, and a line in the log, where CuPy cannot be used."""
    try:
        from dtfm.kernels import gpu

        gpu.prepare(device)
    except (ImportError, RuntimeError) as error:
        log.warning(
            "what %s sends and receives is encoded and decoded on the CPU, which takes longer: CuPy cannot be used (%s). "
            "pip install 'cupy-cuda%sx>=14' has it done on the GPU",
            device,
            error,
            str(torch.version.cuda).partition(".")[0],
        )
        return None
    return gpu
