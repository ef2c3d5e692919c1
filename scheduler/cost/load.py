"""The number of micro-batches that each replica of a stage computes in a step: its load."""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from dtfm.scheduler.model.problem import Ints, Problem


@lru_cache(maxsize=4096)
def balanced_loads(speeds: tuple[float, ...], micro_batches: int) -> tuple[int, ...]:
    """Divides the micro-batches so that the last node finishes as early as possible.

    ``speeds`` are FLOP/s, one per node; the result has one load per node. Of equally good nodes the least loaded comes first.
    """
    loads = [0] * len(speeds)
    queue = [(1.0 / speed, 0, index) for index, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(micro_batches):
        _, load, index = queue[0]
        loads[index] = load + 1
        heapq.heapreplace(queue, ((load + 2) / speeds[index], load + 1, index))
    return tuple(loads)


def group_loads(problem: Problem, group: Ints) -> Ints:
    """The loads of a stage's replicas: int64 [len(group)]."""
    return np.array(balanced_loads(tuple(problem.flops[group].tolist()), problem.workload.micro_batches))
