"""AdamW, written so that replicas on different devices stay equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtfm.protos.plan_pb2 import Run

CPU_CHUNK = 1 << 16
"""Elements that are updated, or squared, at a time on a CPU, so that they stay in its cache; a GPU updates all at once."""

GPU_CHUNK = 1 << 24
"""Elements that are squared at a time on a GPU: in float64 they take twice the memory."""


def learning_rate(train: Run.Train, step: int) -> float:
    """Of step 1, 2, ...: rises linearly over the warm-up, then falls along a cosine to its final share at the last step."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    left = max(train.steps - train.warmup_steps, 1)
    progress = min((step - train.warmup_steps) / left, 1.0)
    final = train.final_learning_rate_fraction
    return train.learning_rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def clip_coefficient(gradient_norm: float, clip_norm: float) -> float:
    """What gradients are multiplied with so that their global norm is at most ``clip_norm`` (0: not clipped)."""
    return min(1.0, clip_norm / (gradient_norm + 1e-6)) if clip_norm > 0 else 1.0


def squared_norm(flat: torch.Tensor) -> float:
    """The sum of the squares of ``flat`` (1-D, any dtype and device), in float64. torch's norms would turn all of it into
    float64 first, which for a bucket of float32 takes twice its memory."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for chunk in torch.split(flat, GPU_CHUNK if flat.is_cuda else CPU_CHUNK):
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total.item()


def decayed_ranges(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Where weight decay applies in a flat tensor of ``parameters`` (name, shape): on matrices and larger, as is usual;
    biases and norms are left alone."""
    ranges, start = [], 0
    for _, shape in parameters:
        stop = start + math.prod(shape)
        if len(shape) >= 2:
            ranges.append((start, stop))
        start = stop
    return ranges


@torch.no_grad()
def adamw(
    train: Run.Train,
    step: int,
    gradient_norm: float,
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    decayed: Sequence[tuple[int, int]],
) -> None:
    """One update, in place, of a bucket's flat tensors (1-D, one dtype and device); ``gradients`` are used up.

    ``decayed`` are the ranges under weight decay. The rule is that of torch.optim.AdamW (Loshchilov and Hutter,
    arXiv 1711.05101). It stands here once more because torch's kernels contract multiply-adds as each device likes: in
    separate operations, each rounded by IEEE 754, a CPU and a GPU replica get the same bits. Division by a number is
    written as multiplication, for torch does the one on some devices and the other on others.
    """
    rate = learning_rate(train, step)
    clip = clip_coefficient(gradient_norm, train.clip_norm)
    to_mean = 1 / (1 - train.beta1**step)
    to_root = 1 / math.sqrt(1 - train.beta2**step)
    for start, stop in decayed:
        parameters[start:stop].mul_(1 - rate * train.weight_decay)
    size = max(parameters.numel(), 1) if parameters.is_cuda else CPU_CHUNK
    for start in range(0, parameters.numel(), size):
        chunk = slice(start, start + size)
        g, m, v = gradients[chunk], exp_avg[chunk], exp_avg_sq[chunk]
        g.mul_(clip)
        m.mul_(train.beta1)
        v.mul_(train.beta2)
        v.add_((g * g).mul_(1 - train.beta2))
        m.add_(g.mul_(1 - train.beta1))
        denominator = v.sqrt().mul_(to_root).add_(train.epsilon)
        parameters[chunk].sub_((m * to_mean).div_(denominator).mul_(rate))
