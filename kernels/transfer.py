"""Between a GPU's memory and the host's, by way of pinned memory: from any other the driver copies everything once more, and
lets the caller wait for all that the stream had to do before.

torch keeps pinned memory that is let go of, and lends it again once no copy is under way in it.
"""

from __future__ import annotations

import numpy as np
import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor``, contiguous and on a GPU, in pinned memory. Waits, asleep, for what the current stream had to do."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return copy


def to_device(data: memoryview, device: torch.device) -> torch.Tensor:
    """A copy of ``data``, 1-D uint8, on the GPU ``device``, for what its current stream does from now on; waits for nothing.
    ``data`` may change at once."""
    copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
    copy.numpy()[:] = np.frombuffer(data, np.uint8)
    return copy.to(device, non_blocking=True)
