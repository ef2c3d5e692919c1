"""The modules that need CuPy, where it can be used. Their kernels are compiled on first use, and kept where other compiled code
is."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

import torch

from dtfm.compiled_code import find_room

log = logging.getLogger(__name__)

INSTEAD = {
    "gpu": "tensors on a GPU are encoded and decoded on the CPU, which is slower",
    "gpu_digest": "the state on a GPU is copied to the host for its digest",
}
"""The modules, and what is done without them."""


def prepare(device: torch.device) -> None:
    """Compiles what encoding, decoding and digests need on ``device``, which otherwise the first of them does. For a CPU,
    importing `kernels/cpu.py` does."""
    if device.type == "cuda":
        for name in INSTEAD:
            module_with_cupy(name, device)


@functools.cache
def module_with_cupy(name: str, device: torch.device) -> ModuleType | None:
    """The module ``name`` of this folder, ready for tensors on ``device``, a GPU. None where CuPy cannot be used: then the log
    has why, and what is done instead."""
    # By itself CuPy writes to the home, which a service may not have. What it finds there it runs.
    os.environ.setdefault("CUPY_CACHE_DIR", str(find_room() / "cupy"))
    try:
        module = importlib.import_module(f"dtfm.kernels.{name}")
        module.prepare(device)
    except Exception as error:  # it is not there, or the driver, the compiler or the file system raises
        log.warning(
            "%s: CuPy cannot be used on %s (%s). To use it: pip install 'cupy-cuda%sx>=14', with a compiler (nvidia-cuda-nvrtc) "
            "that knows this GPU, and a folder in CUPY_CACHE_DIR that can be written",
            INSTEAD[name],
            device,
            " ".join(f"{type(error).__name__}: {error}".split())[:300],
            str(torch.version.cuda).partition(".")[0],
        )
        return None
    return module
