"""The order of stages: a path through all stages with the least sum of boundary costs."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

EXACT_STAGES = 14
"""Largest number of stages that are ordered exactly; for more, 2^stages states would take minutes."""


def best_order(cost: NDArray[np.float64]) -> tuple[float, tuple[int, ...]]:
    """The cheapest order of all stages, and its cost.

    ``cost[i, j]`` is the cost of j right after i: a square matrix of finite numbers, not necessarily symmetric. Exact
    for up to EXACT_STAGES stages by dynamic programming over subsets (Held and Karp 1962). Above, greedy paths from
    every start are improved by moving and reversing segments.
    """
    if len(cost) == 1:
        return 0.0, (0,)
    return _exact(cost) if len(cost) <= EXACT_STAGES else _heuristic(cost)


def path_cost(cost: NDArray[np.float64], order: tuple[int, ...]) -> float:
    """Sum of the boundary costs along an order."""
    return float(sum(cost[a, b] for a, b in itertools.pairwise(order)))


def _exact(cost: NDArray[np.float64]) -> tuple[float, tuple[int, ...]]:
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
    total = float(best[subset, last])
    order = [last]
    while len(order) < size:
        subset ^= 1 << last
        last = int((best[subset] + cost[:, last]).argmin())
        order.append(last)
    return total, tuple(reversed(order))


def _heuristic(cost: NDArray[np.float64]) -> tuple[float, tuple[int, ...]]:
    size = len(cost)
    starts = []
    for first in range(size):
        order, left = [first], set(range(size)) - {first}
        while left:
            after = min(left, key=lambda stage: (cost[order[-1], stage], stage))
            order.append(after)
            left.remove(after)
        starts.append((path_cost(cost, tuple(order)), tuple(order)))
    return min(_improve(cost, order) for _, order in sorted(starts)[:4])


def _improve(cost: NDArray[np.float64], order: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """Applies the best reversal or move of a segment until none helps."""
    total = path_cost(cost, order)
    size = len(order)
    while True:
        candidates = []
        for first in range(size):
            for past in range(first + 1, size + 1):
                segment, rest = order[first:past], order[:first] + order[past:]
                candidates.append(order[:first] + segment[::-1] + order[past:])
                if past - first <= 3:
                    candidates += [rest[:at] + segment + rest[at:] for at in range(len(rest) + 1)]
        index = np.array(candidates)
        sums = cost[index[:, :-1], index[:, 1:]].sum(axis=1)
        best = int(sums.argmin())
        if not sums[best] < total - 1e-12 * abs(total):
            return total, order
        total, order = float(sums[best]), candidates[best]
