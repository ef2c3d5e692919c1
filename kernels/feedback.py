"""Error feedback: what a codec loses of one step's gradients is added to the next step's (arXiv 1809.07599, algorithm 1)."""

from __future__ import annotations

import torch

from dtfm.kernels.codec import Codec, Encoded, decode, encode


def encode_with_feedback(
    codec: Codec, gradients: torch.Tensor, carried: torch.Tensor | None
) -> tuple[Encoded, torch.Tensor]:
    """Encodes ``gradients`` (any shape, n elements) plus ``carried`` (1-D float32, n elements; None at first).

    Returns what is sent, and the residual, which receivers still lack (1-D float32, on the gradients' device): (gradients +
    carried) - decoded, and 0 where that is not finite, so that one bad step does not spoil all later ones. Replace ``carried`` by
    it only once the step is committed: an aborted step's gradients have no effect.
    """
    corrected = gradients.detach().reshape(-1).float()
    if carried is not None:
        corrected = corrected + carried
    encoded = encode(codec, corrected)
    decoded = decode(encoded.codec, encoded.data, corrected.numel(), corrected.dtype, corrected.device)
    residual = torch.nan_to_num(corrected - decoded, nan=0.0, posinf=0.0, neginf=0.0)
    return encoded, residual
