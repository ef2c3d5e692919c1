"""Copies between a GPU's memory and the host's through pinned memory.

From unpinned memory the driver makes one more copy, and blocks the caller until the stream has finished all earlier
work. torch caches released pinned memory and reuses it once no copy is using it.
"""

from __future__ import annotations

import numpy as np
import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` (contiguous, on a GPU) in pinned memory. Waits, without spinning, for the current stream's
    earlier work."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return copy


def to_device(data: memoryview, device: torch.device) -> torch.Tensor:
    """A copy of ``data`` (1-D uint8) on the GPU ``device``, ready for later work on its current stream.

    Does not wait; ``data`` may change at once.
    """
    copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
    copy.numpy()[:] = np.frombuffer(data, np.uint8)
    return copy.to(device, non_blocking=True)
