"""AdamW, written so that replicas on different devices stay equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from dtfm.node.model.bucket import Bucket
from dtfm.protos.plan_pb2 import Run

CPU_CHUNK = 1 << 16
"""Elements that a CPU updates or squares at a time, so that they stay in its cache."""

GPU_CHUNK = 1 << 24
"""Elements that a GPU updates or squares at a time: either takes memory for several copies of them."""

COPIED_CHUNK = 1 << 22
"""Elements of gradients that are copied from a GPU at a time, where the state is in the host's memory."""


def clip_coefficient(gradient_norm: float, clip_norm: float) -> float:
    """The factor that brings the gradients' global norm down to ``clip_norm`` (0: no clipping)."""
    return min(1.0, clip_norm / (gradient_norm + 1e-6)) if clip_norm > 0 else 1.0


def squared_norms(flats: Iterable[torch.Tensor]) -> list[float]:
    """The sum of the squares of each of ``flats`` (1-D, any dtype and device), in float64.

    torch's norms would convert all of it to float64 first, which takes twice the memory of a float32 bucket.
    """
    totals = []
    for flat in flats:
        totals.append(torch.zeros((), dtype=torch.float64, device=flat.device))
        for chunk in torch.split(flat, GPU_CHUNK if flat.is_cuda else CPU_CHUNK):
            wide = chunk.double()
            totals[-1] += torch.dot(wide, wide)
    return [float(total) for total in torch.stack(totals).tolist()] if totals else []


@torch.no_grad()
def adamw(
    train: Run.Train, step: int, rate: float, gradient_norm: float, bucket: Bucket, gradients: torch.Tensor
) -> None:
    """Updates a bucket's state in place, where it is, with flat ``gradients`` of its dtype, which are overwritten unless they are
    on another device. ``rate``: the learning rate.

    The rule is that of torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101), written in separate operations: torch's own
    kernels fuse multiply-adds differently on each device, while separate operations, each rounded by IEEE 754, give a CPU and a
    GPU replica the same bits. Division by a scalar is written as multiplication, because torch divides on some devices and
    multiplies on others. As usual, weight decay applies to tensors of two dimensions or more, not to biases and norms.
    """
    parameters = bucket.parameters
    clip = clip_coefficient(gradient_norm, train.clip_norm)
    to_mean = 1 / (1 - train.beta1**step)
    to_root = 1 / math.sqrt(1 - train.beta2**step)
    for view in bucket.views(parameters).values():
        if view.ndim >= 2:
            view.mul_(1 - rate * train.weight_decay)
    for chunk, g in _chunks(gradients, parameters.device):
        m, v = bucket.exp_avg[chunk], bucket.exp_avg_sq[chunk]
        g.mul_(clip)
        m.mul_(train.beta1)
        v.mul_(train.beta2)
        v.add_((g * g).mul_(1 - train.beta2))
        m.add_(g.mul_(1 - train.beta1))
        denominator = v.sqrt().mul_(to_root).add_(train.epsilon)
        parameters[chunk].sub_((m * to_mean).div_(denominator).mul_(rate))


def _chunks(gradients: torch.Tensor, home: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """Where the chunks are that are updated one by one, and their gradients in the memory of ``home``."""
    size = GPU_CHUNK if home.type == "cuda" else CPU_CHUNK
    copied = COPIED_CHUNK if gradients.device != home else max(gradients.numel(), 1)
    buffer = None
    if gradients.device != home:  # pinned, or a copy takes twice the time
        buffer = torch.empty(
            min(copied, gradients.numel()), dtype=gradients.dtype, device=home, pin_memory=gradients.is_cuda
        )
    for begin in range(0, gradients.numel(), copied):
        part = gradients[begin : begin + copied]
        if buffer is not None:
            part = buffer[: len(part)].copy_(part)
        for start in range(0, len(part), size):
            g = part[start : start + size]
            yield slice(begin + start, begin + start + len(g)), g
