"""BLAKE3 of tensors, computed on the tensor's device, and the same on every device.

On a CPU the library blake3 reads the tensor's memory, in one thread: the others are training. On a GPU our own kernel reads it,
and 32 bytes cross to the host.
"""

from __future__ import annotations

import torch
from blake3 import blake3

from dtfm.kernels.transfer import to_host
from dtfm.kernels.with_cupy import gpu_kernels

COPIED_AT_ONCE = 64 << 20
"""Bytes that are copied from a GPU at a time where CuPy is not installed."""


def digest(tensor: torch.Tensor) -> bytes:
    """BLAKE3 (32 bytes) of the bytes of ``tensor`` (contiguous, little-endian), on any device.

    On a GPU it runs on the current stream, and waits for that without spinning.
    """
    data = tensor.detach().view(-1).view(torch.uint8)
    if not data.is_cuda:
        return blake3(data.numpy().data if data.numel() else b"").digest()
    gpu = gpu_kernels(data.device)
    if gpu is not None and data.numel() > gpu.CHUNK_BYTES and data.data_ptr() % 16 == 0:
        computed: bytes = gpu.digest(data)
        return computed
    copied = blake3()
    for part in torch.split(data, COPIED_AT_ONCE):
        copied.update(to_host(part).numpy().data)
    return copied.digest()
