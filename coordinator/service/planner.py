"""Asks the scheduler for a plan, within the time that a question has."""

from __future__ import annotations

import math
import time

from dtfm.coordinator.core.state import PlanChosen
from dtfm.coordinator.core.transition import PlanWanted
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.schedule import schedule


def choose(wanted: PlanWanted) -> PlanChosen | str:
    """The best plan found in about ``wanted.seconds``, or a sentence that says why these nodes allow none. For a thread of its
    own. Raises ValueError if what the run asks for is impossible with any nodes."""
    until = time.monotonic() + wanted.seconds
    try:
        decision = schedule(
            wanted.cluster,
            wanted.workload,
            wanted.incumbent,
            stages=wanted.stages,
            seed=wanted.seed,
            deadline=lambda: time.monotonic() > until,
            generation=wanted.generation,
            tight_bound=False,
        )
    except Infeasible as error:
        return str(error)
    return PlanChosen(
        decision.plan,
        decision.sentence,
        _finite(decision.predicted.iteration_seconds),
        _finite(decision.lower_bound_seconds),
    )


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
