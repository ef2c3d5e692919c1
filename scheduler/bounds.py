"""What no plan can undercut."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.problem import Floats, Problem
from dtfm.scheduler.workload import Workload


def iteration_bound(problem: Problem) -> float:
    """work_bound of the problem's devices."""
    return work_bound(problem.workload, problem.flops)


def work_bound(workload: Workload, flops: Floats) -> float:
    """Certified lower bound on the seconds per step: all work shared by all devices without a pause, and one micro-batch
    through the fastest device's hands."""
    work = 3.0 * float(np.sum([layer.forward_flops for layer in workload.layers]))
    bound = max(work * workload.micro_batches / float(flops.sum()), work / float(flops.max()))
    return bound * (1.0 - 1e-12)  # sums in another order round otherwise
