"""The dtypes that a run computes in."""

from __future__ import annotations

import torch

from dtfm.protos.plan_pb2 import BF16, FP64, Run


def run_dtype(run: Run) -> torch.dtype:
    """The dtype of weights, gradients, moments and of the activations between stages."""
    return torch.float64 if run.train.precision == FP64 else torch.float32


def uses_autocast(run: Run) -> bool:
    """Whether matrix products are computed in bfloat16."""
    return bool(run.train.precision == BF16)
