"""The device that this node computes on: which, how much memory, how fast."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

import torch

from dtfm.protos.control_pb2 import Device

MEASURE_SECONDS = 0.1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Has this process keep up to 256 MiB that it frees, in pieces up to 32 MiB, for what it allocates next; whether it could
    be told to (glibc's malloc can). Otherwise each frame and tensor asks the kernel for pages, which zeroes them first."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # 32 MiB is the most that glibc takes as a threshold. One arena for all threads: an arena of a thread's own grows by 64 MiB
    # into which tensors fit badly, and what one thread frees another cannot have.
    settings = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 256 << 20, _M_ARENA_MAX: 1}
    return all(mallopt(number, value) == 1 for number, value in settings.items())


def open_device(name: str) -> torch.device:
    """``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``. Raises ValueError for one that is not there.

    What comes next will move tensors, so the process keeps freed memory from here on.
    """
    keep_freed_memory()
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}: give auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: give auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (device.index or 0) >= count:
            raise ValueError(
                f"device {name!r} is not there: PyTorch {torch.__version__} sees {count} GPUs. Is a CUDA build of PyTorch "
                "installed, and does nvidia-smi show the GPU? --device cpu works without one"
            )
        return torch.device("cuda", device.index or 0)
    return device


def measure_device(device: torch.device) -> Device:
    """Name, free memory in bytes and sustained FLOP/s of matrix products (fp32 on a CPU, bf16 on a GPU)."""
    return Device(
        kind=device.type,
        name=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        memory_bytes=free_memory(device),
        flops=_measure_flops(device),
    )


def finish(device: torch.device) -> None:
    """Waits, asleep, until ``device`` has done what this thread's stream was given. A CPU has by then."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def beside(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """To be called where ``tensor`` is computed, and entered wherever it is read: on a GPU what is launched within comes after
    that, on a stream of its own, and not after whatever else is being computed."""
    if not tensor.is_cuda:
        return nullcontext()
    stream = _side_stream(tensor.device)
    computed = torch.cuda.current_stream(tensor.device).record_event()

    @contextmanager
    def on_its_own_stream() -> Iterator[None]:
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            yield

    return on_its_own_stream()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def free_memory(device: torch.device) -> int:
    """In bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measure_flops(device: torch.device) -> float:
    """The median of timed products of two square matrices, after a warm-up."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = 4096 if device.type == "cuda" else 512
    a = torch.ones(size, size, dtype=dtype, device=device)
    b = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)

    def product() -> float:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    product()
    seconds: list[float] = []
    until = time.perf_counter() + MEASURE_SECONDS
    while not seconds or time.perf_counter() < until:
        seconds.append(product())
    return 2.0 * size**3 / sorted(seconds)[len(seconds) // 2]
