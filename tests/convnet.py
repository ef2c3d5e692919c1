"""A small ConvNet and its synthetic images: a model that is no transformer and whose layers are unequal."""

from __future__ import annotations

import torch
from torch import nn

CLASSES = 4
SIDE = 12


def convnet() -> nn.Sequential:
    """Images [b, 3, 12, 12] to logits [b, 4]; some layers have no parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(12 * SIDE * SIDE // 4, CLASSES),
    )


def images(count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs float32 [count, 3, 12, 12] and labels int64 [count]: the class is the quarter that is brighter."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    labels = torch.arange(count) % CLASSES
    half = SIDE // 2
    for index, label in enumerate(labels.tolist()):
        row, column = divmod(label, 2)
        inputs[index, :, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1.0
    return inputs, labels


def images_one_of_them_broken() -> tuple[torch.Tensor, torch.Tensor]:
    """The same, but for one image of NaNs somewhere in the first epoch."""
    inputs, labels = images()
    inputs[100] = torch.nan
    return inputs, labels
