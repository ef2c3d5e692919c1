"""Numbers in other formats, rounded as PyTorch rounds them: to the nearest, and of two equally near ones to the even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Change = Callable[[NDArray[Any]], NDArray[Any]]
"""Returns numbers in place of the next ones of a tensor, given these in at least 32 bits."""

_NAN = np.uint16(0x7FC0)
"""A NaN in bfloat16. Rounding could turn a NaN into an infinity."""


def converted(data: bytes | memoryview, source: str, target: str, change: Change | None = None) -> tuple[bytes, int]:
    """The numbers ``data`` of one of FLOATS, converted to another. Also returns how many became infinite. ``change`` is
    applied to them before they are rounded."""
    before = numbers_of(data, source)
    with np.errstate(over="ignore", invalid="ignore"):
        if change is not None:
            before = change(before.astype(np.promote_types(before.dtype, np.float32)))
        single = before.astype(np.float32)  # PyTorch takes the same way from 64 to 16 bits
        made: NDArray[Any]
        if target == "BF16":
            made = _to_bfloat16(single)
            infinite = (made & 0x7FFF) == 0x7F80
        else:
            made = (before if target == "F64" else single).astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[target])
            infinite = np.isinf(made)
    return made.tobytes(), int(np.count_nonzero(infinite & np.isfinite(before)))


def numbers_of(data: bytes | memoryview, source: str) -> NDArray[Any]:
    """The numbers ``data`` of one of FLOATS. Those of BF16 are float32."""
    if source == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[source])


def _to_bfloat16(single: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each number's bits, rounded by the lower half."""
    bits = single.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(single), _NAN, rounded.astype(np.uint16))
