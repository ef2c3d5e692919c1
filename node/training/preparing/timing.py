"""When an idle node times its device again: a plan may leave it out because the machine was busy during the last timing."""

from __future__ import annotations

from dataclasses import dataclass, replace

QUIET = 0.25
"""A machine is quiet while other programs use less than this share of its cores, and of the GPU."""
SOON_SECONDS = 60.0
"""The least time between two timings."""
AGAIN_SECONDS = 3600.0
"""A device is timed again after this time in any case."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The last timing of the device."""

    at: float
    """When it was, by any clock."""
    beside: bool
    """Whether other programs used the machine."""
    tries: int = 0
    """The number of timings in a row, with this one, that others were beside."""

    def is_due(self, now: float, others: float) -> bool:
        """Whether to time the device again, while other programs use the share ``others`` of the machine. It is due at once when
        the machine has become quiet. Otherwise pauses double, up to an hour."""
        if not self.beside:
            return now >= self.at + AGAIN_SECONDS
        pause = SOON_SECONDS if others < QUIET else min(SOON_SECONDS * 2 ** max(self.tries - 1, 0), AGAIN_SECONDS)
        return now >= self.at + pause

    def again(self, now: float, others: float) -> Timing:
        """The timing that was made just now."""
        beside = others >= QUIET
        return replace(self, at=now, beside=beside, tries=self.tries + 1 if beside else 0)
