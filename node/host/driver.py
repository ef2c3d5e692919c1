"""NVIDIA's driver, and whether PyTorch can use it."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dtfm.installed import torch_line

_OLDEST_CUDA, _OLDEST_DRIVER = 12, (525, 60, 13)
"""PyTorch has no build for an older CUDA. This driver is the first that runs that CUDA, with all its minor versions."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver: its version, and the newest CUDA that it runs, as (major, minor); None if it does not say."""

    version: str
    cuda: tuple[int, int] | None


def judge(
    driver: Driver | None, in_machine: bool, torch_version: str, built_for: str | None, gpus: int
) -> tuple[bool | None, str, str]:
    """Whether PyTorch can use the GPU (None: there seems to be none), a sentence on the finding, and the fix, if any.

    ``in_machine``: an NVIDIA GPU is there. ``built_for``: the CUDA version of this PyTorch, like "12.8"; None: it has no CUDA.
    ``gpus``: the number of GPUs that PyTorch sees.
    """
    build = f"PyTorch {torch_version}, built {f'for CUDA {built_for}' if built_for else 'without CUDA'}"
    if driver is None:
        if in_machine:
            fix = "install NVIDIA's driver, or in a container, start it with --gpus all"
            return False, f"an NVIDIA GPU is in this machine, but no driver; {build}", fix
        if built_for:
            fix = "if this machine has an NVIDIA GPU, install its driver; in a container, start it with --gpus all"
            return None, f"no NVIDIA driver; {build}", fix
        return True, f"no NVIDIA driver, and none is needed; {build}", ""
    known = f"driver {driver.version}"
    if driver.cuda is not None:
        known += f" runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    if why := too_old(driver):
        return False, f"{known}; {why}", UPDATE
    if not built_for:
        return False, f"{known}, but {build}: the GPU lies idle", torch_line("gpu", again=True)
    if is_too_new(built_for, driver):
        return False, f"{known}, but {build}", f"{torch_line('gpu', again=True)}, or update the driver"
    if not gpus:
        fix = (
            "does nvidia-smi show the GPU, and is CUDA_VISIBLE_DEVICES unset? In a container, start it with --gpus all; after an "
            "update, reboot"
        )
        return False, f"{known}; {build}, sees no GPU", fix
    return True, f"{known}; {build}, sees {gpus} GPUs", ""


UPDATE = "update NVIDIA's driver to 525.60.13 or newer; --device cpu works without it"


def too_old(driver: Driver) -> str:
    """Why no build of PyTorch runs under this driver; empty if one does, or if the driver does not say enough."""
    numbers = tuple(int(part) for part in driver.version.split(".") if part.isdecimal())
    old = driver.cuda[0] < _OLDEST_CUDA if driver.cuda is not None else () < numbers < _OLDEST_DRIVER
    return f"no build of PyTorch that dtfm can use runs under it: they need CUDA {_OLDEST_CUDA}" if old else ""


def is_too_new(built_for: str, driver: Driver) -> bool:
    """Whether this build of PyTorch is for a later major version of CUDA than the driver runs. Minor versions do not matter."""
    return driver.cuda is not None and int(built_for.partition(".")[0]) > driver.cuda[0]


def line_for(driver: Driver | None, in_machine: bool, torch_here: bool, built_for: str | None) -> tuple[str, str]:
    """The shell line that installs the packages of a node on this machine, and the reason for this line. ``torch_here``:
    PyTorch is installed, for the CUDA ``built_for``. Raises ValueError, with the fix, if no build of PyTorch can use the
    machine's GPU."""
    if driver is None:
        if in_machine:
            raise ValueError(
                "an NVIDIA GPU is in this machine, but no driver: install it, or in a container, start it with --gpus all; "
                "`dtfm-node install-line --device cpu` prints the line for the CPU alone"
            )
        return torch_line("node"), "no NVIDIA driver: PyTorch for the CPU"
    if why := too_old(driver):
        raise ValueError(f"driver {driver.version}: {why}; {UPDATE} (`dtfm-node install-line --device cpu`)")
    again = torch_here and (not built_for or is_too_new(built_for, driver))
    up_to = f", which runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda is not None else ""
    return torch_line("gpu", again=again), f"driver {driver.version}{up_to}"


def nvidia_driver(said: Path = Path("/proc/driver/nvidia/version")) -> Driver | None:
    """The driver that is loaded, as the kernel and libcuda say; None without one."""
    cuda = None
    with suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
            cuda = (number.value // 1000, number.value % 1000 // 10)
    try:
        words = said.read_text()
    except OSError:
        return None if cuda is None else Driver("of unknown version", cuda)  # as in WSL
    match = re.search(r"\b\d+\.\d+(\.\d+)*\b", words)
    return Driver(match.group() if match else "of unknown version", cuda)


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA GPU is in this machine, as the kernel says, with or without a driver. A container sees its host's GPU."""
    if any(root.glob("proc/driver/nvidia/gpus/*")) or any(root.glob("dev/nvidia[0-9]*")):
        return True
    if (root / "dev/dxg").exists():  # WSL, which passes on GPUs of other makers too
        return nvidia_driver(root / "proc/driver/nvidia/version") is not None
    devices = [device.parent for device in root.glob("sys/bus/pci/devices/*/vendor") if "0x10de" in device.read_text()]
    return any((device / "class").read_text().startswith("0x03") for device in devices)
