"""Routes: which micro-batches travel along which chain of nodes, given the stages."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from dtfm.scheduler.assemble.matching import bottleneck_matching
from dtfm.scheduler.assemble.spread import spread
from dtfm.scheduler.cost.load import balanced_loads
from dtfm.scheduler.model.problem import Draft, Floats, Groups, Ints, Problem

EXACT_PAIRING = 256
"""Largest number of micro-batches for which two stages are paired exactly; above, the pairing is greedy."""
SPREAD_LINKS = 64
"""Largest number of links between two stages for which overloaded links are relieved."""


def route(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> Draft:
    """Divides the micro-batches by speed inside every stage, and joins stages so that exchanges are short.

    Between two stages with the same number of nodes and equal loads this is the paper's matching (section 3.3), which
    minimizes the worst exchange. In general it is a transport problem, solved as an assignment of single micro-batches with
    the least sum. Where a link would be busy for longer than every device and connection, other links relieve it.
    """
    total = problem.workload.micro_batches
    counts = [balanced_loads(tuple(problem.flops[list(group)]), total) for group in groups]
    busiest = _busiest(problem, groups, cuts, counts)
    chains = np.repeat(np.array(groups[0], dtype=np.int64), counts[0])[:, None]
    for stage in range(1, len(groups)):
        senders, receivers = np.array(groups[stage - 1]), np.array(groups[stage])
        if len(receivers) == 1:
            following = np.full(total, receivers[0])
        elif len(senders) == 1:
            following = np.repeat(receivers, counts[stage])
        else:
            size = float(problem.activation[cuts[stage] - 1])
            cost = problem.exchange(senders, receivers, size)
            at = np.searchsorted(senders, chains[:, -1])
            if counts[stage - 1] == counts[stage] and len(set(counts[stage])) == 1:
                following = receivers[np.array(bottleneck_matching(cost)[1])[at]]
            else:
                following = receivers[_transport(cost, at, counts[stage])]
            if len(senders) * len(receivers) <= SPREAD_LINKS:
                following = _relieved(problem, cost, size, chains[:, -1], following, senders, receivers, busiest)
        chains = np.column_stack([chains, following])
    unique, index = np.unique(chains, axis=0, return_inverse=True)
    return Draft(groups, cuts, unique, np.bincount(index.ravel()))


def _busiest(problem: Problem, groups: Groups, cuts: tuple[int, ...], counts: list[tuple[int, ...]]) -> float:
    """Seconds that the busiest device computes, or that the busiest connection sends or receives activations and gradients."""
    work = np.diff(problem.flops_before[list(cuts)])
    passing = np.concatenate([[0.0], problem.activation[np.array(cuts[1:-1], dtype=np.int64) - 1], [0.0]])
    longest = 0.0
    for stage, group in enumerate(groups):
        nodes = list(group)
        least = problem.ratio[nodes].min()  # the least, so that a codec's own gain does not hide the link
        carried = np.maximum(np.minimum(problem.up[nodes], problem.down[nodes]), 1e-300)  # 0 without links
        connection = least * (passing[stage] + passing[stage + 1]) / carried
        each = np.maximum(3 * work[stage] / problem.flops[nodes], connection)
        longest = max(longest, float((each * counts[stage]).max()))
    return longest


def _relieved(
    problem: Problem, cost: Floats, size: float, at: Ints, following: Ints, senders: Ints, receivers: Ints, free: float
) -> Ints:
    """``following``, changed so that no link is busy for much longer than necessary.

    ``following`` [micro-batches] are the receivers of the micro-batches that are ``at`` the senders. A link that is
    busy for at most ``free`` seconds needs no relief.
    """
    rows, columns = np.searchsorted(senders, at), np.searchsorted(receivers, following)
    known = np.zeros(cost.shape, dtype=np.int64)
    np.add.at(known, (rows, columns), 1)
    there, back = problem.slowness[np.ix_(senders, receivers)], problem.slowness[np.ix_(receivers, senders)].T
    slowest = np.maximum(there, back)
    counts = spread(cost, np.where(np.isinf(slowest), np.inf, slowest * max(size, 1e-300)), known, free)
    if counts is known:
        return following
    result = following.copy()
    for row, numbers in enumerate(counts):
        result[rows == row] = np.repeat(receivers, numbers)
    return result


def interleaved(draft: Draft) -> Draft:
    """The same shares, with each route's micro-batches spread evenly over the step instead of one route after another.

    Nodes compute lower numbers first, so where routes share a node, those with the highest numbers would wait.
    """
    counts = draft.shares
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.repeat(np.arange(len(counts)), counts)[np.argsort(place, kind="stable")]
    starts = np.flatnonzero(np.diff(order, prepend=-1))
    return Draft(draft.groups, draft.cuts, draft.chains[order[starts]], np.diff(starts, append=len(order)))


def _transport(cost: Floats, at: Ints, counts: tuple[int, ...]) -> Ints:
    """A column for every micro-batch at row ``at``, such that column c gets counts[c] micro-batches."""
    cost = np.where(np.isfinite(cost), cost, 1e9)
    if len(at) > EXACT_PAIRING:
        return _greedy_transport(cost, at, counts)
    slots = np.repeat(np.arange(len(counts)), counts)
    _, columns = linear_sum_assignment(cost[at][:, slots])
    return np.asarray(slots[columns])


def _greedy_transport(cost: Floats, at: Ints, counts: tuple[int, ...]) -> Ints:
    """Takes the cheapest pairs first, and from time to time drops pairs of which one side has nothing left."""
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
