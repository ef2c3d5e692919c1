"""Which micro-batches travel which chain of nodes, given the stages."""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np
from scipy.optimize import linear_sum_assignment

from dtfm.scheduler.matching import bottleneck_matching
from dtfm.scheduler.problem import Draft, Floats, Groups, Ints, Problem

EXACT_PAIRING = 256
"""Up to so many micro-batches the pairing of two stages is exact; above, it is greedy."""


@lru_cache(maxsize=4096)
def shares(speeds: tuple[float, ...], micro_batches: int) -> tuple[int, ...]:
    """Whole micro-batches per node such that the last to finish finishes as early as possible; ties go to idle hands."""
    counts = [0] * len(speeds)
    queue = [(1.0 / speed, 0, index) for index, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(micro_batches):
        _, count, index = queue[0]
        counts[index] = count + 1
        heapq.heapreplace(queue, ((count + 2) / speeds[index], count + 1, index))
    return tuple(counts)


def route(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> Draft:
    """Shares by speed inside every stage; stages joined so that exchanges are short.

    Where two stages have as many nodes with equal shares this is the paper's matching (section 3.3): the worst exchange is as
    short as possible. In general it is a transport of shares, solved as a pairing of single micro-batches with the least sum.
    """
    total = problem.workload.micro_batches
    counts = [shares(tuple(problem.flops[list(group)]), total) for group in groups]
    chains = np.repeat(np.array(groups[0], dtype=np.int64), counts[0])[:, None]
    for stage in range(1, len(groups)):
        senders, receivers = np.array(groups[stage - 1]), np.array(groups[stage])
        if len(receivers) == 1:
            following = np.full(total, receivers[0])
        elif len(senders) == 1:
            following = np.repeat(receivers, counts[stage])
        else:
            cost = problem.exchange(senders, receivers, float(problem.activation[cuts[stage] - 1]))
            at = np.searchsorted(senders, chains[:, -1])
            if counts[stage - 1] == counts[stage] and len(set(counts[stage])) == 1:
                following = receivers[np.array(bottleneck_matching(cost)[1])[at]]
            else:
                following = receivers[_transport(cost, at, counts[stage])]
        chains = np.column_stack([chains, following])
    unique, index = np.unique(chains, axis=0, return_inverse=True)
    return Draft(groups, cuts, unique, np.bincount(index.ravel()))


def interleaved(draft: Draft) -> Draft:
    """The same shares, each route's spread evenly over the step instead of one route after the other.

    Nodes take lower numbers first, so that where routes share a node, those numbered last would wait.
    """
    counts = draft.shares
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.repeat(np.arange(len(counts)), counts)[np.argsort(place, kind="stable")]
    starts = np.flatnonzero(np.diff(order, prepend=-1))
    return Draft(draft.groups, draft.cuts, draft.chains[order[starts]], np.diff(starts, append=len(order)))


def _transport(cost: Floats, at: Ints, counts: tuple[int, ...]) -> Ints:
    """A column for every micro-batch, that stands at row ``at``, such that column c gets counts[c] of them."""
    cost = np.where(np.isfinite(cost), cost, 1e9)
    if len(at) > EXACT_PAIRING:
        return _greedy_transport(cost, at, counts)
    slots = np.repeat(np.arange(len(counts)), counts)
    _, columns = linear_sum_assignment(cost[at][:, slots])
    return np.asarray(slots[columns])


def _greedy_transport(cost: Floats, at: Ints, counts: tuple[int, ...]) -> Ints:
    """The cheapest pairs first; pairs of which one side has nothing left are dropped from time to time."""
    order = np.argsort(at, kind="stable")
    start = np.searchsorted(at[order], np.arange(len(cost)))
    waiting, free = np.bincount(at, minlength=len(cost)), np.array(counts)
    result = np.zeros(len(at), dtype=np.int64)
    rows, columns = np.divmod(np.argsort(cost, axis=None, kind="stable"), cost.shape[1])
    while len(rows):
        for row, column in zip(rows[:4096].tolist(), columns[:4096].tolist(), strict=True):
            number = min(waiting[row], free[column])
            if number:
                result[order[start[row] : start[row] + number]] = column
                start[row] += number
                waiting[row] -= number
                free[column] -= number
        rows, columns = rows[4096:], columns[4096:]
        useful = (waiting[rows] > 0) & (free[columns] > 0)
        rows, columns = rows[useful], columns[useful]
    return result
