"""The order of stages: a path through all stages with the least sum of boundary costs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EXACT_STAGES = 14
"""Largest number of stages that are ordered; for more, 2^stages states would take minutes."""


def best_order(cost: NDArray[np.float64]) -> tuple[int, ...]:
    """The cheapest order of all stages, by dynamic programming over subsets (Held and Karp 1962).

    ``cost[i, j]`` is the cost of j right after i: a square matrix of finite numbers, not necessarily symmetric. More than
    EXACT_STAGES stages stay in the order in which they are: the search's walk reverses parts of it.
    """
    if len(cost) > EXACT_STAGES:
        return tuple(range(len(cost)))
    size = len(cost)
    members = np.arange(1 << size)
    # best[set, last]: cheapest path through all of `set` that ends at `last`.
    best = np.full((1 << size, size), np.inf)
    best[1 << np.arange(size), np.arange(size)] = 0.0
    counts = np.array([value.bit_count() for value in range(1 << size)])
    for count in range(2, size + 1):
        of_this_count = members[counts == count]
        for last in range(size):
            sets = of_this_count[of_this_count >> last & 1 == 1]
            best[sets, last] = (best[sets ^ (1 << last)] + cost[:, last]).min(axis=1)
    subset = (1 << size) - 1
    last = int(best[subset].argmin())
    order = [last]
    while len(order) < size:
        subset ^= 1 << last
        last = int((best[subset] + cost[:, last]).argmin())
        order.append(last)
    return tuple(reversed(order))
