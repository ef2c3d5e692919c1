"""Reports a spike of the loss once: a loss far above its own usual spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dtfm.coordinator.core.plan import rollback
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.recent_losses import Kind

SPREADS = 6.0
"""A spike is this many times the usual spread above the usual loss. The spread is a standard deviation, estimated from the median
absolute deviation, so that a few outliers do not change it."""

LEAST_SHARE = 0.05
"""A spike is also at least this share of the usual loss above it."""

TO_SIGMA = 1.4826
"""A normal distribution's standard deviation as a multiple of its median absolute deviation."""

IN_A_ROW: dict[Kind, int] = {"training": 4, "held-out": 3}
"""The number of losses in a row that must be above the limit: a single loss may come from a strange batch."""

LEAST: dict[Kind, int] = {"training": 28, "held-out": 8}
"""The least number of earlier losses that the usual loss is taken from."""


@dataclass(frozen=True, slots=True)
class Spike:
    """``usual``: the loss before the spike. ``limit``: a loss above this belongs to the spike."""

    usual: float
    limit: float


def spike(losses: Sequence[float], in_a_row: int, least: int) -> Spike | None:
    """Compares the last ``in_a_row`` losses with earlier ones. Returns None if nothing spikes, or fewer than ``least`` are
    earlier.

    A spike is above all losses before, and above their median by SPREADS and by LEAST_SHARE. The first condition bounds the false
    alarms. With 64 losses and 4 in a row, independent values of any distribution meet it once in 635,376 (64 choose 4).
    """
    before, last = losses[:-in_a_row], losses[-in_a_row:]
    if len(before) < least or min(last) <= max(before):
        return None
    usual = statistics.median(before)
    spread = TO_SIGMA * statistics.median(abs(loss - usual) for loss in before)
    limit = max(usual + max(SPREADS * spread, LEAST_SHARE * abs(usual)), *before)
    return Spike(usual, limit) if min(last) > limit else None


def look(transition: Transition, kind: Kind) -> None:
    """Reports a spike that has just begun. The last loss is in the ledger."""
    state = transition.state
    recent, in_a_row = state.ledger.losses.of(kind), IN_A_ROW[kind]
    found = spike([loss for _, loss in recent.losses], in_a_row, LEAST[kind]) if not recent.spiked else None
    if found is None:
        return
    (since, _), (step, loss) = recent.losses[-in_a_row], recent.losses[-1]
    back_to = next(place.point.step for place in rollback.places(state) if place.point.step < since)
    rate = state.ledger.optimizer.learning_rate
    transition.emit(ev.LossSpiked(step, kind, loss, found.usual, found.limit, since, back_to, rate))
