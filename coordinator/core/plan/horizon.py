"""How long a plan is expected to stand: what a move to another plan costs must pay in that time."""

from __future__ import annotations

from collections.abc import Sequence

from dtfm.coordinator.log.training import MOST_LOSSES
from dtfm.scheduler.schedule import HORIZON_SECONDS


def horizon_seconds(losses: Sequence[int], step: int, left: int, step_seconds: float | None) -> float:
    """Expected seconds until the plan loses a node, or until the run ends.

    ``losses``: see Training; ``step`` is the last committed one, ``left`` the number of those to come, ``step_seconds`` what one
    takes, None while that is not known. A run counts as if it had seen one loss in HORIZON_SECONDS before it began. While fewer
    than MOST_LOSSES are known, these are all since it began.
    """
    if step_seconds is None:
        return HORIZON_SECONDS
    since, *later = losses if len(losses) == MOST_LOSSES else (0, *losses)
    usual = (HORIZON_SECONDS + max(0, step - since) * step_seconds) / (1 + len(later))
    return max(1.0, min(usual, left * step_seconds))
