"""The codecs by name and number, and how many bytes each makes of a tensor."""

from __future__ import annotations

import enum

import torch


class Codec(enum.IntEnum):
    """How a tensor's elements become bytes. The numbers are on the wire."""

    OFF = 0
    """The elements as they are, little-endian."""


# Numbers are on the wire.
DTYPES: dict[int, torch.dtype] = {1: torch.float32, 2: torch.float64, 3: torch.bfloat16, 4: torch.float16}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def codec_named(name: str) -> Codec:
    """The codec that the run file calls ``name``, e.g. ``i8b256``."""
    try:
        return Codec[name.upper()]
    except KeyError:
        known = ", ".join(c.name.lower() for c in Codec)
        raise ValueError(f"there is no codec {name!r}; this version has {known}") from None


def encoded_bytes(codec: Codec, elements: int, dtype: torch.dtype) -> int:
    """Length in bytes of ``elements`` elements of ``dtype`` under ``codec``."""
    assert codec is Codec.OFF
    return elements * dtype.itemsize


def encode(codec: Codec, tensor: torch.Tensor) -> memoryview:
    """``tensor``'s elements (any shape, row-major) as uint8; a view of the tensor's own memory where nothing changes."""
    assert codec is Codec.OFF
    flat = tensor.detach().contiguous().cpu().view(-1)
    return flat.view(torch.uint8).numpy().data


def decode(codec: Codec, encoded: memoryview, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The 1-D tensor that ``encoded`` stands for.

    Raises ValueError when the length does not fit the codec and ``elements``.
    """
    if len(encoded) != encoded_bytes(codec, elements, dtype):
        raise ValueError(f"{len(encoded)} bytes are no {elements} elements of {dtype} under {codec.name.lower()}")
    return torch.frombuffer(encoded, dtype=dtype, count=elements).to(device)
