"""The order of stages: a path through all stages with the least sum of boundary costs."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import entry
from dtfm.scheduler.model.problem import Floats, Ints

EXACT_STAGES = 14
"""Largest number of stages that are ordered: time and memory double with each stage more."""


def best_order(cost: Floats) -> tuple[int, ...]:
    """The cheapest order of all stages.

    ``cost[i, j]`` is the cost of j right after i: a square matrix of finite numbers, not necessarily symmetric. More than
    EXACT_STAGES stages keep their order: the search's walks change it already.
    """
    if len(cost) > EXACT_STAGES:
        return tuple(range(len(cost)))
    return tuple(cheapest_path(cost)[0].tolist())


@entry(makes_arrays=True)
def cheapest_path(cost: Floats) -> tuple[Ints, float]:
    """The order, int64 [stages], and its cost, by dynamic programming over subsets (Held and Karp 1962)."""
    size = len(cost)
    # least[set, last]: the cheapest path through all of `set` that ends at `last`.
    least = np.full((1 << size, size), np.inf)
    for stage in range(size):
        least[1 << stage, stage] = 0.0
    for subset in range(1, 1 << size):
        for last in range(size):
            if not subset >> last & 1 or subset == 1 << last:
                continue
            rest = subset ^ (1 << last)
            for before in range(size):
                seconds = least[rest, before] + cost[before, last]
                if seconds < least[subset, last]:
                    least[subset, last] = seconds
    order = np.empty(size, np.int64)
    subset = (1 << size) - 1
    last = int(np.argmin(least[subset]))
    total = least[subset, last]
    order[size - 1] = last
    for at in range(size - 2, -1, -1):
        subset ^= 1 << last
        nearest, seconds = -1, np.inf
        for before in range(size):
            if subset >> before & 1 and least[subset, before] + cost[before, last] < seconds:
                nearest, seconds = before, least[subset, before] + cost[before, last]
        last = nearest
        order[at] = last
    return order, total
