"""The device that this node computes on: its name, memory and speed."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dtfm.protos.access import MOST_NAMES_OF_A_KEY
from dtfm.protos.control_pb2 import Device

MEASURE_SECONDS = 0.1
"""Seconds of timed matrix products."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Makes malloc keep up to 256 MiB of freed memory, in pieces of up to 32 MiB, for later allocations.

    Otherwise each frame and tensor asks the kernel for pages, which zeroes them first. Returns whether it worked: glibc only.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # 32 MiB is the largest threshold that glibc accepts. One arena for all threads: a thread's own arena grows in steps of
    # 64 MiB, which fit tensors badly, and memory that one thread frees is not available to another.
    settings = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 256 << 20, _M_ARENA_MAX: 1}
    return all(mallopt(number, value) == 1 for number, value in settings.items())


def open_device(name: str) -> torch.device:
    """The device named ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``. Also sets malloc to keep freed
    memory. Raises ValueError for a device that does not exist."""
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


def free_memory(device: torch.device) -> int:
    """Free memory in bytes: the GPU's, or the host's for a CPU."""
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
    """FLOP/s of a product of two square matrices: the median after a warm-up."""
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


def devices_named(text: str) -> tuple[str, ...]:
    """The devices that ``text`` names: ``all`` GPUs, one device, or several with commas between them. Raises ValueError."""
    if text == "all":
        if not (count := _count_gpus()):
            raise ValueError(
                f"--device all: PyTorch {torch.__version__} sees no GPU on this machine. Is a CUDA build of PyTorch installed, "
                "and does nvidia-smi show the GPUs? --device cpu lends the processor instead"
            )
        return tuple(f"cuda:{number}" for number in range(count))
    named = tuple(each.strip() for each in text.split(","))
    if len(named) == 1:
        return named
    for number, name in enumerate(named):
        if name != "cpu" and not (name.startswith("cuda:") and name[5:].isdecimal()):
            raise ValueError(f"--device {text}: {name!r} cannot be one of several; give cpu or cuda:N, or all")
        if name != "cpu" and name in named[:number]:
            raise ValueError(f"--device {text}: {name} is there twice; a GPU is one node")
    if len(named) > MOST_NAMES_OF_A_KEY:
        raise ValueError(
            f"--device: {len(named)} devices are more than {MOST_NAMES_OF_A_KEY}, the most that a machine may have"
        )
    return named


def slots(devices: Sequence[str]) -> list[str]:
    """For each of several devices a name of letters and digits, the same at every start: cuda0, cpu, cpu2."""
    counted = [devices[: number + 1].count(name) for number, name in enumerate(devices)]
    return [name.replace(":", "") + (str(n) if n > 1 else "") for name, n in zip(devices, counted, strict=True)]


def _count_gpus() -> int:
    """Counted by a process of its own: CUDA does not work in the forks of a process that has begun to use it."""
    if (child := os.fork()) == 0:
        count = 0
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        finally:
            os._exit(min(count, MOST_NAMES_OF_A_KEY))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
