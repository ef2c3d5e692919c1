"""Has the codecs compiled before this node says that it is ready: nobody is to wait for it at the first plan that compresses."""

from __future__ import annotations

import asyncio
import sys

import torch

from dtfm.compiled_code import compile_apart
from dtfm.kernels.codec import prepare, runs_on


async def compile_codecs(device: torch.device) -> None:
    """Returns when nothing is left to compile for tensors on ``device``: after half a second, or after some seconds on a
    machine's first start."""
    on_gpu = await asyncio.to_thread(runs_on, device)
    if not on_gpu and "dtfm.kernels.cpu" not in sys.modules:
        await compile_apart("dtfm.kernels.cpu")
    await asyncio.to_thread(prepare, device)
