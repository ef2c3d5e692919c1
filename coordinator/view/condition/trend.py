"""Whether a loss rises: the training loss against its own spread, the held-out loss against its lowest value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WINDOW = 20
"""The number of steps over which the training loss is smoothed."""
SPREADS, LEAST_RISE = 3.0, 0.005
"""The training loss rises when it exceeds its lowest value by this number of spreads, and by this part of that value."""
MOST_SPREADS = 4.0
"""A single step moves the smoothed loss as if it were at most this number of spreads away."""
STEPS_ABOVE = 5
"""The number of steps after the lowest value before a rise counts."""
EVALUATIONS_ABOVE, LEAST_HELD_OUT_RISE = 2, 0.01
"""The held-out loss rises when this number of evaluations in a row are above the lowest one, and the last by this part of it."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The training loss so far, smoothed."""

    count: int = 0
    """The number of steps."""
    level: float = 0.0
    """The smoothed loss."""
    spread: float = 0.0
    """The mean distance of a step's loss from ``level``."""
    low: float = 0.0
    """The lowest ``level`` since the first WINDOW steps, whose spread is not known yet."""
    low_spread: float = 0.0
    """The ``spread`` at that step."""
    low_step: int = 0
    since_low: int = 0
    """The number of steps since then."""

    def after(self, step: int, loss: float) -> Trend:
        """The trend with the loss of one more step."""
        if not math.isfinite(loss):
            return self
        if not self.count:
            return Trend(1, loss, 0.0, loss, 0.0, step, 0)
        weight, off = 2 / (1 + min(self.count + 1, WINDOW)), loss - self.level
        most = MOST_SPREADS * self.spread if self.count > WINDOW else math.inf
        level = self.level + weight * max(-most, min(off, most))
        spread = self.spread + weight * (abs(off) - self.spread)
        later = replace(self, count=self.count + 1, level=level, spread=spread, since_low=self.since_low + 1)
        if level > self.low and self.count > WINDOW:
            return later
        return replace(later, low=level, low_spread=spread, low_step=step, since_low=0)

    @property
    def rises_since(self) -> int | None:
        """The step with the lowest smoothed loss, if the loss has risen since; None: it has not."""
        if self.count <= WINDOW or self.since_low < STEPS_ABOVE:
            return None
        above = self.level - self.low
        return self.low_step if above > max(SPREADS * self.low_spread, LEAST_RISE * abs(self.low)) else None

    @property
    def word(self) -> str:
        """ "falling", "level" or "rising"; empty: too few steps to tell."""
        if self.count <= WINDOW:
            return ""
        return "rising" if self.rises_since is not None else "falling" if self.since_low < WINDOW else "level"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluations so far."""

    low: float | None = None
    """The lowest loss; None before the first."""
    low_step: int = 0
    last: float = 0.0
    above: int = 0
    """The number of evaluations since the lowest one."""

    def after(self, step: int, loss: float) -> HeldOut:
        """The evaluations with one more."""
        if not math.isfinite(loss):
            return self
        if self.low is None or loss <= self.low:
            return HeldOut(loss, step, loss, 0)
        return replace(self, last=loss, above=self.above + 1)

    @property
    def rises_since(self) -> int | None:
        """The step of the lowest evaluation, if the loss has risen since; None: it has not."""
        if self.low is None or self.above < EVALUATIONS_ABOVE:
            return None
        return self.low_step if self.last - self.low > LEAST_HELD_OUT_RISE * abs(self.low) else None
