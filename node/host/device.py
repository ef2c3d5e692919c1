"""The device that this node computes on: its name, memory and speed."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from pathlib import Path

import torch

from dtfm.node.host.driver import has_nvidia_gpu, judge, nvidia_driver
from dtfm.protos.control_pb2 import Device

MEASURE_SECONDS = 0.1
"""Seconds of timed matrix products."""
RESERVE_FRACTION, LEAST_RESERVE_BYTES = 0.03, 512 << 20
"""Reserved of a GPU's free memory: for the workspaces of libraries, and for the parts of its blocks that torch's allocator
cannot use."""
HOST_FRACTION = 0.75
"""The part of the host's free memory for optimizer state and copies for safety. The rest is for data and other processes."""
MOST_NAME = 80
"""Characters of a CPU's name."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h

OWN = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def keep_freed_memory() -> None:
    """Makes malloc keep up to 256 MiB of freed memory, in pieces of up to 32 MiB, for later allocations.

    Otherwise each frame and tensor asks the kernel for pages, which zeroes them first. For glibc only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    # 32 MiB is the largest threshold that glibc accepts. One arena for all threads: a thread's own arena grows in steps of
    # 64 MiB, which fit tensors badly, and memory that one thread frees is not available to another.
    for number, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 256 << 20), (_M_ARENA_MAX, 1)):
        if mallopt is not None:
            mallopt(number, value)


def open_device(name: str, asked: str = "") -> torch.device:
    """The device named ``auto`` (the first GPU, or the CPU of a machine without one), ``cpu``, ``cuda`` or ``cuda:N``.

    ``asked``: the user's name for it, if this process sees that GPU alone. Also sets malloc to keep freed memory.

    Raises ValueError for a device that does not exist, and for ``auto`` if PyTorch cannot use the GPU of this machine: its
    owner would not notice that the CPU works instead.
    """
    keep_freed_memory()
    if name == "auto":
        if not torch.cuda.is_available() and has_nvidia_gpu():
            _, why, fix = judge(nvidia_driver(), True, torch.__version__, torch.version.cuda, 0)
            raise ValueError(
                f"the GPU of this machine cannot be used: {why}. To use it: {fix}. --device cpu works without it"
            )
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
                f"device {asked or name!r} is not there: PyTorch {torch.__version__} sees {count} GPUs. Is a CUDA build of "
                "PyTorch installed, and does nvidia-smi show the GPU? --device cpu works without one"
            )
        return torch.device("cuda", device.index or 0)
    return device


LEAST_BF16_CAPABILITY = (8, 0)
"""Older GPUs compute in bfloat16 by converting, more slowly than in float32."""


def has_bf16(device: torch.device) -> bool:
    """Whether the device is a GPU with arithmetic in bfloat16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_BF16_CAPABILITY


def check_bf16(device: torch.device) -> None:
    """Raises ValueError if ``device`` is a GPU without arithmetic in bfloat16; every CPU has it, if slowly."""
    if device.type == "cuda" and not has_bf16(device):
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise ValueError(
            f"the run computes in bf16, which {name} (compute capability {'.'.join(map(str, capability))}) cannot: join with a "
            f"GPU of {'.'.join(map(str, LEAST_BF16_CAPABILITY))} or more (A100, RTX 30 and newer), or give the run "
            '[train] precision = "fp32"'
        )


def why_slow_in_fp32(device: torch.device) -> str:
    """A sentence on the part of ``device`` that a run in fp32 leaves unused: its tensor cores, if it is a GPU without bf16.
    Empty otherwise."""
    if device.type != "cuda" or has_bf16(device):
        return ""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return (
        f"this run computes in fp32, and so not on the tensor cores of {torch.cuda.get_device_name(device)} (compute capability "
        f"{capability}), which know fp16 and no bf16; dtfm has no fp16. Among GPUs of 8.0 or more alone a run in bf16 is several "
        "times as fast: such a run refuses this GPU"
    )


def measure_device(device: torch.device, gpus: int | None = None) -> Device:
    """Name, memory in bytes and sustained FLOP/s of matrix products (bf16 on a GPU that has it, otherwise fp32).

    Of a GPU's free memory a reserve is left out. The host's memory is divided among the machine's GPUs: ``gpus``, by default
    the number that this process sees.
    """
    if device.type == "cuda":
        free = free_memory(device)  # with the driver's context made, which takes some hundreds of MiB
        of_host = int(HOST_FRACTION * free_memory(torch.device("cpu")) / (gpus or torch.cuda.device_count()))
        return Device(
            kind="cuda",
            name=torch.cuda.get_device_name(device),
            memory_bytes=max(0, free - max(LEAST_RESERVE_BYTES, int(RESERVE_FRACTION * free))),
            flops=measure_flops(device, torch.bfloat16 if has_bf16(device) else torch.float32),
            host_memory_bytes=of_host,
            bf16=has_bf16(device),
        )
    return Device(
        kind=device.type,
        name=cpu_name(),
        memory_bytes=free_memory(device),
        flops=measure_flops(device, torch.float32),
    )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model from Linux (for an ARM core its implementer and part). On other systems Python's answer, which may be the
    architecture alone. At most MOST_NAME printable characters. The coordinator uses it to tell which devices round alike."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n", 1)[0].splitlines()  # of the first core
    except OSError:
        lines = []
    told = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    arm = [f"{part} {told[part]}" for part in ("CPU implementer", "CPU part") if part in told]
    names = told.get("model name", ""), f"{platform.machine()} {' '.join(arm)}" if arm else "", platform.processor()
    cleaned = (" ".join("".join(c if c.isascii() and c.isprintable() else " " for c in name).split()) for name in names)
    return next((name[:MOST_NAME].rstrip() for name in cleaned if name), platform.machine())


def free_memory(device: torch.device) -> int:
    """Free memory in bytes: the GPU's, the host's for a CPU, or the part of it that a container may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    room = room_in_groups()
    return _available() if room is None else min(room, _available())


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_flops(device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS) -> float:
    """FLOP/s of a product of two square matrices: the median of the products in ``seconds``, after a warm-up."""
    size = 4096 if device.type == "cuda" else 512
    # Of random numbers: where all bits are alike, a GPU takes less power, and is faster.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> float:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    product()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        taken.append(product())
    return 2.0 * size**3 / sorted(taken)[len(taken) // 2]


def room_in_groups(own: Path = OWN, mounted: Path = MOUNTED) -> int | None:
    """Bytes that this process's groups may still take: the least over all groups. None if no group has a limit.

    /proc/meminfo says nothing of Linux's control groups. Cached files count as free: the kernel drops them when memory is
    short. See cgroups(7), and the kernel's admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files, top = ("memory.max", "memory.current", "inactive_file"), mounted
        elif "memory" in controllers.split(","):
            files, top = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), mounted / "memory"
        else:
            continue
        # In a container, the path may be the host's, and only its top is there.
        group = top / path.lstrip("/")
        above = (each for each in (group, *group.parents) if each.is_relative_to(top))
        rooms += (room for each in above if (room := _room(each, *files)) is not None)
    return max(0, min(rooms)) if rooms else None


def _room(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """The bytes that the group may still take. None: the group is not there, or has no limit."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if most == "max" else int(most) - used + int(stat.get(cached, 0))
    except (OSError, ValueError):
        return None
