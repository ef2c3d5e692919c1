"""The gradients of a step on their way to standbys: as they are, or, where most are zero as after a sparse codec, the others with
their places. Either way the same bits arrive."""

from __future__ import annotations

import numpy as np
import torch

from dtfm.kernels.transfer import to_host

PLACE = np.dtype("<u4")


def pack(gradients: torch.Tensor) -> memoryview:
    """The bytes of flat ``gradients``, a copy: of all, or, if that is less, of all places and then all values that are not 0."""
    if not len(gradients):
        return memoryview(b"")
    values = to_host(gradients).view(torch.uint8).numpy()
    bits = values.view(f"u{gradients.element_size()}")  # by bits, -0.0 is not 0
    packed = np.count_nonzero(bits) * (PLACE.itemsize + bits.itemsize)
    if bits.size > np.iinfo(PLACE).max or packed >= values.size:
        return values.data
    places = np.flatnonzero(bits)
    return memoryview(places.astype(PLACE).tobytes() + bits[places].tobytes())


def unpack(data: bytes | bytearray, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor of which `pack` made ``data``. Raises ValueError for bytes that it cannot have made."""
    if len(data) == elements * dtype.itemsize:
        return torch.frombuffer(data, dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    count, rest = divmod(len(data), PLACE.itemsize + dtype.itemsize)
    places = np.frombuffer(data, PLACE, count)
    if rest or (count and not (places[-1] < elements and np.all(places[:-1] < places[1:]))):
        raise ValueError(f"{len(data)} bytes are not {elements} elements of {dtype}, nor places and values of some")
    made = torch.zeros(elements, dtype=dtype)
    bits = made.view(torch.uint8).numpy().view(f"u{dtype.itemsize}")
    bits[places] = np.frombuffer(data, bits.dtype, count, count * PLACE.itemsize)
    return made
