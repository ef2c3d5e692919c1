"""The dtypes of a run.

In bf16, the state (parameters and moments) and a step's gradients are in float32. A copy of the parameters to compute with, the
activations and their gradients are in bfloat16. Unlike torch.autocast, there is one copy of the parameters per step, not one
per micro-batch in flight, and links carry 2 bytes per number. Norms, softmax and rotary angles are computed in float32 if the
family's own code computes them so, as in any bfloat16 training with transformers.
"""

from __future__ import annotations

import torch

from dtfm.protos.plan_pb2 import BF16, FP64, Run


def run_dtype(run: Run) -> torch.dtype:
    """The dtype of the state and of the gradients that are added up over a step."""
    return torch.float64 if run.train.precision == FP64 else torch.float32


def compute_dtype(run: Run) -> torch.dtype:
    """The dtype to compute in. Activations between stages and their gradients have the same dtype."""
    return torch.bfloat16 if run.train.precision == BF16 else run_dtype(run)
