"""Muon, for the matrices of a stage's layers: with torch.optim.Muon's functions, so that it equals one process's.

A matrix moves along its momentum, orthogonalised by products of matrices in bfloat16 (Keller Jordan, 2024). The rates are those
of AdamW (Liu et al., arXiv 2502.16982), so that one learning rate serves both.

Two devices round products differently. So one replica, the matrix's owner, finds its update before the vote, and all replicas
take the owner's bits (training/reduction/matrix_updates.py), as standbys do. The sums of gradients go to all replicas as with
AdamW, and each replica moves its own momentum by them. It does both in operations that round the same everywhere. So all replicas
have the whole state, and if the owner is lost, another replica can find the update.
Clipping does not apply to these matrices. Their updates have one size, whatever size their gradients have, and how far a step
is clipped is known only after all votes.
"""

from __future__ import annotations

import torch

from dtfm.kernels.transfer import to_host
from dtfm.node.model.bucket import Bucket

MOMENTUM = 0.95
"""The part of the momentum that remains after a step, as torch.optim.Muon has it by default."""

STEPS = 5
"""Of Newton and Schulz's iteration, as there."""

CHUNK = 1 << 24
"""Elements that are updated at a time."""


USED = ("DEFAULT_A", "DEFAULT_B", "DEFAULT_C", "EPS", "_zeropower_via_newtonschulz", "_adjust_lr")
"""Of torch.optim._muon. None of them is promised to stay."""


def check_muon() -> None:
    """Raises ValueError if this node's torch does not have what is used here."""
    try:
        from torch.optim import _muon
    except ImportError:
        _muon = None  # type: ignore[assignment]
    if not all(hasattr(_muon, name) for name in USED):
        raise ValueError(
            f'train.optimizer = "muon" was tested with torch 2.13 and needs 2.9 or later; this is {torch.__version__}: install '
            "torch 2.13"
        )


@torch.no_grad()
def orthogonalise(bucket: Bucket, gradients: torch.Tensor, name: str) -> None:
    """Finds the update of a matrix, from its momentum and the flat ``gradients`` of the bucket, on their device."""
    from torch.optim import _muon  # not in older versions: see check_muon

    gradient = bucket.views(gradients)[name]
    momentum = bucket.views(bucket.moments[0])[name].to(gradient.device)
    ahead = gradient.lerp(momentum.lerp(gradient, 1 - MOMENTUM), MOMENTUM)
    coefficients = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
    found = _muon._zeropower_via_newtonschulz(ahead, coefficients, STEPS, _muon.EPS)
    bucket.matrices(bucket.updates)[name].copy_(found)


@torch.no_grad()
def muon(rate: float, weight_decay: float, bucket: Bucket, gradients: torch.Tensor, updates: torch.Tensor) -> None:
    """Updates the matrices of a bucket's state in place, on the device or in the host's memory, with flat ``gradients`` and
    ``updates``. Each operation is rounded by itself."""
    if not bucket.spec.orthogonal:
        return
    mean = bucket.views(bucket.moments[0])
    parameters, gradient = bucket.views(bucket.parameters), bucket.views(gradients)
    for name, update in bucket.matrices(updates).items():
        decayed = 1 - rate * weight_decay if bucket.spec.decays(name, update.ndim) else 1.0
        adjusted = rate_of(rate, update.shape)
        flat = (each.flatten() for each in (parameters[name], gradient[name], mean[name], update))
        for p, g, m, u in zip(*(torch.split(each, CHUNK) for each in flat), strict=True):
            g, u = (to_host(each) if each.is_cuda and not p.is_cuda else each for each in (g, u))
            m.mul_(MOMENTUM).add_(g * (1 - MOMENTUM))
            p.mul_(decayed).sub_(u.to(p.dtype).mul_(adjusted))


def rate_of(rate: float, shape: torch.Size) -> float:
    """The rate of a matrix's updates, which are as large then as AdamW's."""
    from torch.optim import _muon  # see above

    adjusted: float = _muon._adjust_lr(rate, "match_rms_adamw", shape)
    return adjusted
