"""Copies between a GPU's memory and the host's through pinned memory.

From unpinned memory the driver makes one more copy, and blocks the caller until the stream has finished all earlier
work.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dtfm.kernels.memory import SMALLEST_BYTES, Memory

KEPT_BYTES = 1 << 30
"""Most bytes of unused pinned blocks that are kept: they take far longer to make than others."""


def arriving(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy ``tensor`` (contiguous) to the host, from a GPU to pinned memory.

    Whoever calls what it returns gets the copy, and waits, without spinning, for what was queued on the current stream before,
    not for what is queued after it. Before that, a large copy must not be dropped: its memory would be used again meanwhile.
    """
    if not tensor.is_cuda:
        copy = tensor.detach().clone()
        return lambda: copy
    copy = _pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))

    def arrived() -> torch.Tensor:
        copied.synchronize()
        return copy

    return arrived


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` (contiguous) in the host's memory, once it is there: see `arriving`."""
    return arriving(tensor)()


def page_locked(size: int) -> NDArray[np.uint8]:
    """``size`` bytes that GPUs read and write by themselves ("pinned"), until nothing refers to them. Raises what CUDA does."""
    block = np.frombuffer(mmap.mmap(-1, size), np.uint8)  # whole pages
    cuda, address = torch.cuda.cudart(), block.ctypes.data  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, size, 0)))
    weakref.finalize(block, cuda.cudaHostUnregister, address).atexit = False
    return block


PINNED = Memory(KEPT_BYTES, page_locked)
"""This process's memory for what comes from GPUs. torch's would round up to powers of two, and keep all that it ever had."""


def _pinned(size: int) -> torch.Tensor:
    if size >= SMALLEST_BYTES:
        return torch.from_numpy(PINNED.take(size))
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def to_device(data: memoryview, device: torch.device) -> torch.Tensor:
    """A copy of ``data`` (1-D uint8) on the GPU ``device``, ready for later work on its current stream.

    Does not wait; ``data`` may change at once.
    """
    copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
    copy.numpy()[:] = np.frombuffer(data, np.uint8)
    return copy.to(device, non_blocking=True)
