"""Bottleneck perfect matching: pairs two groups one to one so that the worst pair costs as little as possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

SMALL = 64
"""Largest size at which bit sets are faster than SciPy's matching and recursion stays shallow."""


def bottleneck_cost(cost: NDArray[np.float64]) -> float:
    """The cost of the worst pair in the best matching of a square matrix.

    A threshold search (arXiv 2206.01288, section 3.3, made exact): the answer is an entry of the matrix, and whether
    a matching exists among entries up to a threshold is a bipartite matching problem. No answer is below the cheapest
    entry of the worst row or column, which usually is the answer. Infinite entries count as the largest.
    """
    floor = max(cost.min(axis=1).max(), cost.min(axis=0).max())
    if _matches(cost <= floor):
        return float(floor)
    thresholds = np.unique(cost[cost > floor])
    low, high = 0, len(thresholds) - 1  # with all entries a matching exists
    while low < high:
        middle = (low + high) // 2
        if _matches(cost <= thresholds[middle]):
            high = middle
        else:
            low = middle + 1
    return float(thresholds[high])


def _matches(allowed: NDArray[np.bool_]) -> bool:
    """Whether there is a perfect matching within the allowed pairs (augmenting paths over bit sets)."""
    size = len(allowed)
    if size > SMALL:
        return bool((maximum_bipartite_matching(csr_array(allowed), perm_type="column") >= 0).all())
    packed = np.packbits(allowed, axis=1, bitorder="little")
    options = [int.from_bytes(row, "little") for row in packed.tolist()]
    row_of = [-1] * size

    def place(row: int, unseen: int) -> int:
        """Finds a column for the row. Returns -1 when it found one, otherwise the columns still unseen."""
        while options[row] & unseen:
            bit = options[row] & unseen
            bit &= -bit
            unseen &= ~bit
            column = bit.bit_length() - 1
            if row_of[column] >= 0:
                unseen = place(row_of[column], unseen)
                if unseen >= 0:
                    continue
            row_of[column] = row
            return -1
        return unseen

    return all(place(row, (1 << size) - 1) < 0 for row in range(size))
