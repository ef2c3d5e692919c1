"""Copies between a GPU's memory and the host's through pinned memory.

From unpinned memory the driver makes one more copy, and blocks the caller until the stream has finished all earlier work. If
the driver refuses to pin, as in WSL 2, unpinned memory serves: slower, and right.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from dtfm.kernels.memory import SMALLEST_BYTES, Memory

log = logging.getLogger(__name__)

_CUDA_RUNTIMES = "libcudart.so.12", "libcudart.so.13"
_ONLY_LOADED = 4
"""RTLD_NOLOAD of Linux's dlfcn.h: a library that is not in use is not opened."""

KEPT_BYTES = 1 << 30
"""Bytes of unused pinned blocks to keep: a pinned block takes far longer to make than an ordinary one. If steps use more, more
are kept."""
USE_SECONDS = 900.0
"""The pool remembers at least this long how much was in use at one time. A step should take less."""


def arriving(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy ``tensor`` (contiguous) to the host, from a GPU to pinned memory. Returns a function that waits for the
    copy and returns it.

    The function waits without spinning, and only for work that was queued on the current stream before the copy. Do not drop
    the function of a large copy before calling it: another tensor would reuse the copy's memory.
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
    """A copy of ``tensor`` (contiguous) in the host's memory. Waits until the copy is there: see `arriving`."""
    return arriving(tensor)()


def page_locked(size: int) -> NDArray[np.uint8]:
    """``size`` bytes that GPUs read and write by themselves ("pinned"), until nothing refers to them. Not pinned if CUDA
    refuses it."""
    block = np.frombuffer(mmap.mmap(-1, size), np.uint8)  # whole pages
    cuda, address = torch.cuda.cudart(), block.ctypes.data  # type: ignore[no-untyped-call]
    if refused := int(cuda.cudaHostRegister(address, size, 0)):
        _forget_error()
        _say_once(f"CUDA error {refused}")
    else:
        weakref.finalize(block, cuda.cudaHostUnregister, address).atexit = False
    return block


def pinned(size: int) -> torch.Tensor:
    """``size`` bytes (1-D uint8) of pinned memory from torch's allocator, for small pieces. Not pinned if CUDA refuses it."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # torch has taken CUDA's error away by then
        _say_once(str(error).partition("\n")[0])
        return torch.empty(size, dtype=torch.uint8)


def _forget_error() -> None:
    """Takes CUDA's last error away. Otherwise the next kernel would be blamed for the error."""
    for name in _CUDA_RUNTIMES:
        with suppress(OSError):  # only one of them is loaded
            ctypes.CDLL(name, mode=_ONLY_LOADED).cudaGetLastError()


@functools.cache
def _say_once(why: str) -> None:
    log.warning(
        "CUDA pins no memory of the host here (%s): copies between the GPU and the host are slower. In WSL 2 this is usual; a "
        "larger memory= in .wslconfig may help",
        why,
    )


PINNED = Memory(KEPT_BYTES, page_locked, USE_SECONDS)
"""This process's memory for tensors from GPUs. torch's allocator would round up to powers of two, and free nothing."""


def _pinned(size: int) -> torch.Tensor:
    return torch.from_numpy(PINNED.take(size)) if size >= SMALLEST_BYTES else pinned(size)


def to_device(data: memoryview, device: torch.device) -> torch.Tensor:
    """A copy of ``data`` (1-D uint8) on the GPU ``device``, ready for later work on its current stream.

    Does not wait. The caller may change ``data`` right after.
    """
    copy = pinned(len(data))
    copy.numpy()[:] = np.frombuffer(data, np.uint8)
    return copy.to(device, non_blocking=True)
