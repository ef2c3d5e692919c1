"""Has the codecs compiled before this node says that it is ready: nobody is to wait for it at the first plan that compresses."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec

import torch

from dtfm.compiled_code import compile_apart
from dtfm.kernels.codec import prepare


async def compile_codecs(device: torch.device) -> None:
    """Returns when nothing is left to compile for tensors on ``device``: after half a second, or after some seconds on a
    machine's first start."""
    on_cpu = device.type == "cpu" or find_spec("cupy") is None
    if on_cpu and "dtfm.kernels.cpu" not in sys.modules:
        await compile_apart("dtfm.kernels.cpu")
    await asyncio.to_thread(prepare, device)
