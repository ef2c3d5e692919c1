"""How far islands' changes spread around their mean: the noise of the gradients, at the scale of a round.

An island with the share w of a step's samples changes the model by a signal that all islands have in common, and by noise of its
own. The mean change has the squared norm S + N: S is the signal's, N the noise's. The island's change has S + N / w. So the two
norms give N and S, and each island gives them again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

MOST_NOISE = 1e6
"""A larger ratio counts as this one. It is reached where the islands' changes have nothing in common."""

REMEMBERED = 8
"""The number of exchanges that are remembered."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What an exchange shows. ``islands``: their number. ``length``: the steps of the round. ``noise``: N / S."""

    islands: int
    length: float
    noise: float


def noise_of(norms: Mapping[int, float], mean: float, shares: Mapping[int, float]) -> float:
    """N / S, from the norm of each island's change and of their ``mean``. ``shares``: by island, that of a step's samples; they
    add up to 1. The median over the islands: a minority that lies does not move it beyond what others say."""
    noise = statistics.median_low(
        max(0.0, norms[island] ** 2 - mean**2) * share / (1 - share) for island, share in shares.items()
    )
    signal = mean**2 - noise
    return min(noise / signal, MOST_NOISE) if signal > 0 else MOST_NOISE * (noise > 0)
