"""The devices that a user names, which may be several. PyTorch takes seconds to load: it is loaded only to count GPUs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from dtfm.protos.identity.access import MOST_NAMES_OF_A_KEY


def devices_named(text: str) -> tuple[str, ...]:
    """The devices that ``text`` names: ``all`` GPUs, one device, or several with commas between them. Raises ValueError."""
    if text == "all":
        import torch

        if not (count := _count_gpus()):
            raise ValueError(
                f"--device all: PyTorch {torch.__version__} sees no GPU on this machine. Is a CUDA build of PyTorch installed, "
                "and does nvidia-smi show the GPUs? --device cpu lends the processor instead"
            )
        return tuple(f"cuda:{number}" for number in range(count))
    named = tuple(each.strip() for each in text.split(","))
    if len(named) == 1:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
            raise ValueError(f"there is no device {text!r}: give auto, all, cpu, cuda or cuda:N")
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


def gpus_here(devices: Path = Path("/dev")) -> int | None:
    """The number of GPUs that this process may use, without asking CUDA. None if nothing tells, as in WSL."""
    if (visible := _visible()) is not None:
        return len(visible)
    return len([each for each in devices.glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal()]) or None


def see_only(name: str) -> str:
    """Hides all other GPUs from this process, if ``name`` is cuda:N and that GPU is there. Returns PyTorch's new name for it.

    Call it before CUDA is used. Each new thread begins on the first GPU that the process sees, and would take memory there for
    a context. N counts within the user's CUDA_VISIBLE_DEVICES, be that numbers, GPU-... or MIG-...
    """
    kind, _, number = name.partition(":")
    count = gpus_here()
    if kind != "cuda" or not number or (count is not None and int(number) >= count):
        return name
    visible = _visible()
    os.environ["CUDA_VISIBLE_DEVICES"] = number if visible is None else visible[int(number)]
    return "cuda:0"


def _visible() -> list[str] | None:
    """The devices in CUDA_VISIBLE_DEVICES; CUDA reads it up to the first impossible name. None: it is not set."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return None
    names = (name.strip() for name in said.split(","))
    return list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, names))


def _count_gpus() -> int:
    """Counts the GPUs in a process of its own: CUDA does not work in the forks of a process that has begun to use it."""
    import torch

    if (child := os.fork()) == 0:
        count = 0
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        finally:
            os._exit(min(count, MOST_NAMES_OF_A_KEY))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
