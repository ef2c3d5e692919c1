"""How gradients are clipped. The coordinator says it of each step, and auditors of a whole round work it out again."""

from __future__ import annotations


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """The factor that brings gradients of this ``norm`` down to ``clip_norm`` (0: no clipping)."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
