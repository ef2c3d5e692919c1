"""Asking the scheduler."""

from __future__ import annotations

import math
import time

from dtfm.coordinator.core.state import PlanChosen
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.schedule import schedule


def choose(
    cluster: Cluster,
    workload: Workload,
    incumbent: Plan | None,
    *,
    stages: int | tuple[int, ...] | None,
    seed: int,
    generation: int,
    seconds: float,
) -> PlanChosen | str:
    """A plan found within about so many seconds, or a sentence about why these nodes allow none. For a thread of its own.

    Raises ValueError where what the run asks for is impossible with any nodes.
    """
    until = time.monotonic() + seconds
    try:
        decision = schedule(
            cluster,
            workload,
            incumbent,
            stages=stages,
            seed=seed,
            deadline=lambda: time.monotonic() > until,
            generation=generation,
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
