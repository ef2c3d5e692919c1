"""The simplest lower bound on the seconds per step of any plan."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Floats
from dtfm.scheduler.model.workload import Workload


def work_bound(workload: Workload, flops: Floats) -> float:
    """Certified lower bound from the devices alone.

    All devices share all work without a pause, and one micro-batch passes through the fastest device.
    """
    work = 3.0 * float(np.sum([layer.forward_flops for layer in workload.layers]))
    bound = max(work * workload.micro_batches / float(flops.sum()), work / float(flops.max()))
    return bound * (1.0 - 1e-12)  # margin for rounding: others add up the same terms in another order
