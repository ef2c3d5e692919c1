"""What is usual of a number that comes again and again: a moving average that nobody can lead far in a few steps.

Watching numbers like these at the receiver follows SENTINEL (arXiv 2603.03592).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dtfm.protos.frame import Kind

NEW_SHARE = 0.1
"""The share of the newest number in an average, once it is known."""

KNOWN_AFTER = 10
"""So many numbers are seen before any counts as unusual."""

CLAMPED = 3.0
"""A number moves its average as if it were at most so many deviations away."""

MOST_DEVIATIONS = 1e6
"""What is further away, or no number, counts as this far."""


@dataclass(frozen=True, slots=True)
class Usual:
    """The mean and the variance of the last numbers. The deviation counts as at least ``least`` and at most ``most``: so numbers
    that were all the same do not make the next one unusual, and wild ones do not hide what comes after them."""

    least: float
    most: float
    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0

    @property
    def is_known(self) -> bool:
        return self.seen >= KNOWN_AFTER

    @property
    def deviation(self) -> float:
        return min(max(math.sqrt(self.variance), self.least), self.most)

    def deviations(self, value: float) -> float:
        """How far ``value`` is from the mean: 0 to MOST_DEVIATIONS."""
        far = abs(value - self.mean) / self.deviation
        return min(far, MOST_DEVIATIONS) if not math.isnan(far) else MOST_DEVIATIONS

    def moved(self, value: float) -> Usual:
        """After one more number. One that is not finite changes nothing."""
        if not math.isfinite(value):
            return self
        if not self.seen:
            return replace(self, mean=value, seen=1)
        share = max(NEW_SHARE, 1 / (self.seen + 1))
        most = CLAMPED * self.deviation
        change = min(max(value - self.mean, -most), most)
        variance = (1 - share) * (self.variance + share * change * change)
        return replace(self, mean=self.mean + share * change, variance=variance, seen=min(self.seen + 1, KNOWN_AFTER))


@dataclass(frozen=True, slots=True)
class Unusual:
    """A tensor that ``node`` sent is unlike those before it: of this kind, and of this micro-batch (ACTIVATION, GRADIENT) or
    bucket (REDUCE)."""

    node: str
    kind: Kind
    index: int
    deviations: float
