"""Loads the module that needs CuPy, gpu.py, if CuPy can be used. Its kernels are compiled on first use, and kept beside other
compiled code."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

import torch

from dtfm.compiled_code import find_room

log = logging.getLogger(__name__)


def prepare(device: torch.device) -> None:
    """Compiles the code of encoding, decoding and digests for ``device``. Otherwise the first of these calls would compile it.
    For a CPU, importing `kernels/cpu.py` compiles it."""
    if device.type == "cuda":
        gpu_kernels(device)


@functools.cache
def gpu_kernels(device: torch.device) -> ModuleType | None:
    """The module gpu.py, ready for tensors on ``device``, a GPU. None if CuPy cannot be used: then the log says why, and what
    replaces it."""
    # By itself CuPy writes to the home, which a service may not have. What it finds there it runs.
    os.environ.setdefault("CUPY_CACHE_DIR", str(find_room() / "cupy"))
    try:
        module = importlib.import_module("dtfm.kernels.gpu")
        module.prepare(device)
    except Exception as error:  # it is not there, or the driver, the compiler or the file system raises
        log.warning(
            "tensors on a GPU are encoded and decoded on the CPU, which is slower, and the state is copied to the host for its "
            "digest: CuPy cannot be used on %s (%s). It needs CuPy (`dtfm-node install-line` prints how to install it), a "
            "compiler that knows this GPU (NVRTC, which PyTorch brings), and a folder in CUPY_CACHE_DIR that can be written",
            device,
            " ".join(f"{type(error).__name__}: {error}".split())[:300],
        )
        return None
    return module
