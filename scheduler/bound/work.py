"""A lower bound on the seconds per step of any plan, from the devices alone."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Problem

AS_GOOD = 1.005
"""A plan that takes at most this many times the bound is as good as any."""


def work_bound(problem: Problem) -> float:
    """Certified: all devices share all work without a pause, and one micro-batch passes through the fastest device."""
    work, flops = 3.0 * float(np.sum([layer.forward_flops for layer in problem.workload.layers])), problem.flops
    bound = max(work * problem.workload.micro_batches / float(flops.sum()), work / float(flops.max()))
    return bound * (1.0 - 1e-12)  # margin for rounding: others add up the same terms in another order
