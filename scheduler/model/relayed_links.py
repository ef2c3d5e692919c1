"""Links over a relay: each counts with at most an even share of the relay's line."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Floats, Problem


def shared_slowness(problem: Problem, per_byte: Floats) -> Floats:
    """Seconds per byte of a tensor on each link when its relay serves all its nodes at the same time; 0 where the link is
    direct. ``per_byte`` is by row of Tables.node."""
    slowness = np.zeros_like(problem.slowness)
    for relay in np.unique(problem.via[problem.via >= 0]):
        served = problem.via == relay
        slowness[served] = per_byte[relay] * np.count_nonzero(served.any(axis=1))
    return slowness
