"""Parameters without memory, for following a model's computation without doing it."""

from __future__ import annotations

import torch
from torch import nn


def fake_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Under a FakeTensorMode: replaces parameters by ones with a device and a shape but no memory, of ``dtype`` or their own."""
    fakes: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                if old not in fakes:
                    fakes[old] = nn.Parameter(torch.empty(old.shape, dtype=dtype or old.dtype))
                part._parameters[name] = fakes[old]
