"""The dtypes of a run.

In bf16, the state (parameters and moments) and the gradients of a step are in float32; what is computed with, a copy of the
parameters, the activations and their gradients, is in bfloat16. Unlike under torch.autocast there is one copy of the parameters
per step, not one per micro-batch in flight, and what crosses a link has 2 bytes. Norms, softmax and rotary angles are computed in
float32 where the family's own code does so, as in any bfloat16 training with transformers.
"""

from __future__ import annotations

import torch

from dtfm.protos.plan_pb2 import BF16, FP64, Run


def run_dtype(run: Run) -> torch.dtype:
    """The dtype of the state and of the gradients that are added up over a step."""
    return torch.float64 if run.train.precision == FP64 else torch.float32


def compute_dtype(run: Run) -> torch.dtype:
    """The dtype that is computed in, and that of the activations between stages and of their gradients."""
    return torch.bfloat16 if run.train.precision == BF16 else run_dtype(run)
