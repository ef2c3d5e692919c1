"""Error feedback: what a codec leaves out of one exchange is added to the next one's changes (arXiv 1809.07599, algorithm 1)."""

from __future__ import annotations

import torch

from dtfm.kernels.codec import Codec, Encoded, decode, encode

KEPT = 0.95
"""The share of what is left out that counts in the next exchange, as in SparseLoCo (arXiv 2508.15706): older changes fade."""


def encode_with_feedback(
    codec: Codec, changes: torch.Tensor, carried: torch.Tensor | None
) -> tuple[Encoded, torch.Tensor]:
    """Encodes ``changes`` (any shape, n elements) plus KEPT of ``carried`` (1-D float32, n elements; None at first).

    Returns what is sent, and the residual (1-D float32, on the changes' device): what was encoded, less what arrives, and 0 where
    that is not finite. Replace ``carried`` by it only once the exchange is committed: one that is aborted has no effect.
    """
    corrected = changes.detach().reshape(-1).float()
    if carried is not None:
        corrected = corrected + KEPT * carried
    encoded = encode(codec, corrected)
    decoded = decode(encoded.codec, encoded.data, corrected.numel(), corrected.dtype, corrected.device)
    residual = torch.nan_to_num(corrected - decoded, nan=0.0, posinf=0.0, neginf=0.0)
    return encoded, residual
