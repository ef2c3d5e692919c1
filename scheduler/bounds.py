"""What no plan can undercut."""

from __future__ import annotations

from dtfm.scheduler.problem import Problem


def iteration_bound(problem: Problem) -> float:
    """Certified lower bound on the seconds per step: all work shared by all devices without a pause, and one micro-batch
    through the fastest device's hands."""
    work = 3.0 * float(problem.flops_before[-1])
    bound = max(work * problem.workload.micro_batches / float(problem.flops.sum()), work / float(problem.flops.max()))
    return bound * (1.0 - 1e-12)  # sums in another order round otherwise
