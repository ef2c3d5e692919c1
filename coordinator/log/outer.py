"""The outer steps that an exchange tried, and which of them it applies: a pure function of what the log has, so that anybody can
check the choice."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtfm.protos.outer import OuterStep


@dataclass(frozen=True, slots=True)
class Looked:
    """What islands say of outer steps that they tried on held-out samples."""

    steps: tuple[OuterStep, ...]
    """The outer steps, the last exchange's first."""
    losses: Mapping[str, tuple[float, ...]]
    """By voice, the mean loss under each. Islands of the same parties have one voice, with the number of the first of them."""
    seconds: float
    """How long it took: the median over nodes."""

    @property
    def gains(self) -> tuple[float, ...]:
        """By outer step, how far its loss is below that of the first one: the median over the voices, for an even number of them
        the lower of the two in the middle. So an outer step gains only if more than half of the voices say so."""
        each = [[told[0] - loss for loss in told] for told in self.losses.values()]
        return tuple(map(statistics.median_low, zip(*each, strict=True)))

    @property
    def best(self) -> OuterStep:
        """The one that gains most; of equals, the first."""
        gains = self.gains
        return self.steps[gains.index(max(gains))]


def outer_step_of(run: Mapping[str, Any]) -> OuterStep | None:
    """The outer step that the run file (as JSON) names; None: each exchange chooses."""
    train = run.get("train", {})
    rate, momentum = train.get("outer_rate", 1.0), train.get("outer_momentum", 0.0)
    return None if rate == "auto" else OuterStep(float(rate), float(momentum))
