"""The summed gradients of a step, or an exchange's sum, on their way to standbys: encoded by a codec, followed by the elements
that the codec changes, with their places. So the same bits arrive. After them come Muon's updates, as they are."""

from __future__ import annotations

import numpy as np
import torch

from dtfm.kernels.codec import Codec, Encoded, decode, encode, encoded_bytes
from dtfm.kernels.transfer import to_host
from dtfm.node.model.bucket import UPDATES_DTYPE

PLACE = np.dtype("<u4")
_BITS = {4: torch.int32, 8: torch.int64}

BASES = Codec.RAW16, Codec.I4B64
"""Codecs that keep the bits of their own decoded values. Under I8B256 most blocks would have another scale."""


def pack(gradients: torch.Tensor, codec: Codec, updates: torch.Tensor | None = None) -> Encoded:
    """A copy of the sum of ``gradients`` (flat), and of Muon's ``updates`` (flat) if there are any."""
    packed = _pack(gradients, codec)
    if updates is None or not len(updates):
        return packed
    more = to_host(updates).view(torch.uint8).numpy()
    return Encoded(packed.codec, memoryview(packed.data.tobytes() + more.tobytes()))


def _pack(gradients: torch.Tensor, codec: Codec) -> Encoded:
    """A copy of flat ``gradients`` as ``codec`` decodes them: encoded, then the places and values of elements with other
    bits. If most elements differ, or the codec leaves elements out: only elements that are not 0, with their places."""
    if not len(gradients):
        return Encoded(Codec.OFF, memoryview(b""))
    base = encode(codec, gradients) if codec in BASES else Encoded(Codec.OFF, memoryview(b""))
    bits = differ = gradients.view(_BITS[gradients.element_size()])  # by bits, -0.0 is not 0
    if base.data:
        decoded = decode(base.codec, base.data, len(bits), gradients.dtype, gradients.device)
        differ = bits != decoded.view(bits.dtype)
    packed = len(base.data) + int(differ.count_nonzero()) * (PLACE.itemsize + bits.element_size())
    if len(bits) > np.iinfo(PLACE).max or packed >= gradients.nbytes:
        return Encoded(Codec.OFF, to_host(gradients).view(torch.uint8).numpy().data)
    places = differ.nonzero().view(-1)
    at, values = to_host(places).numpy().astype(PLACE), to_host(bits[places]).numpy()
    return Encoded(base.codec, memoryview(base.data.tobytes() + at.tobytes() + values.tobytes()))


def unpack(
    codec: Codec, data: bytearray, elements: int, dtype: torch.dtype, updates: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat tensors that `pack` encoded to ``data`` under ``codec``: ``elements`` gradients, and this many ``updates``.
    Raises ValueError for bytes that it cannot have made."""
    end = len(data) - updates * UPDATES_DTYPE.itemsize
    if end < 0:
        raise ValueError(f"{len(data)} bytes are less than {updates} updates have")
    found = torch.frombuffer(data[end:], dtype=UPDATES_DTYPE) if updates else torch.empty(0, dtype=UPDATES_DTYPE)
    return _unpack(codec, data[:end] if updates else data, elements, dtype), found


def _unpack(codec: Codec, data: bytes | bytearray, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor that `_pack` encoded to ``data`` under ``codec``."""
    if codec is Codec.OFF and len(data) == elements * dtype.itemsize:
        return torch.frombuffer(data, dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    begin = encoded_bytes(codec, elements, dtype) if codec in BASES else 0
    count, rest = divmod(len(data) - begin, PLACE.itemsize + dtype.itemsize)
    places = np.frombuffer(data, PLACE, max(0, count), min(begin, len(data)))
    if count < 0 or rest or (count and not (places[-1] < elements and np.all(places[:-1] < places[1:]))):
        raise ValueError(
            f"{len(data)} bytes are not {elements} elements of {dtype} under {codec.name.lower()}, nor places and values of some"
        )
    made = torch.zeros(elements, dtype=dtype)
    if begin:
        made = decode(codec, memoryview(data)[:begin], elements, dtype, torch.device("cpu"))
    bits = made.view(torch.uint8).numpy().view(f"u{dtype.itemsize}")
    bits[places] = np.frombuffer(data, bits.dtype, count, begin + count * PLACE.itemsize)
    return made
