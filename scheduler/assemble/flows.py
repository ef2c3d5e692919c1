"""Flows: how many micro-batches go from each node of a stage to each node of the next."""

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


def connected(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> Draft:
    """Divides the micro-batches by speed inside every stage, and connects stages so that exchanges are short.

    Between two stages with the same number of nodes and equal loads this is the paper's matching (section 3.3), which
    minimizes the worst exchange. In general it is a transport problem, solved as an assignment of single micro-batches with
    the least sum. Where a link would be busy for longer than every device and connection, other links relieve it.
    """
    total = problem.workload.micro_batches
    loads = tuple(
        np.array(balanced_loads(tuple(problem.flops[list(group)]), total), dtype=np.int64) for group in groups
    )
    busiest = _busiest(problem, groups, cuts, loads)
    flows = tuple(_flows(problem, groups, cuts, loads, boundary, busiest) for boundary in range(len(groups) - 1))
    return Draft(groups, cuts, loads, flows)


def _flows(
    problem: Problem, groups: Groups, cuts: tuple[int, ...], loads: tuple[Ints, ...], boundary: int, busiest: float
) -> Ints:
    """The micro-batches on each link after the stage ``boundary``: int64 [senders, receivers]."""
    senders, receivers = np.array(groups[boundary]), np.array(groups[boundary + 1])
    out_of, into = loads[boundary], loads[boundary + 1]
    if len(senders) == 1 or len(receivers) == 1:
        return np.outer(out_of, into) // problem.workload.micro_batches
    size = float(problem.activation[cuts[boundary + 1] - 1])
    cost = problem.exchange(senders, receivers, size)
    if len(senders) == len(receivers) and len({*out_of.tolist(), *into.tolist()}) == 1:
        flows = np.zeros(cost.shape, dtype=np.int64)
        flows[np.arange(len(senders)), bottleneck_matching(cost)[1]] = out_of
    else:
        flows = _transport(cost, out_of, into)
    if len(senders) * len(receivers) <= SPREAD_LINKS:
        flows = _relieved(problem, cost, size, flows, senders, receivers, busiest)
    return flows


def _busiest(problem: Problem, groups: Groups, cuts: tuple[int, ...], loads: tuple[Ints, ...]) -> float:
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
        longest = max(longest, float((each * loads[stage]).max()))
    return longest


def _relieved(
    problem: Problem, cost: Floats, size: float, flows: Ints, senders: Ints, receivers: Ints, free: float
) -> Ints:
    """``flows``, changed so that no link is busy for much longer than necessary. A link that is busy for at most ``free``
    seconds needs no relief."""
    there, back = problem.slowness[np.ix_(senders, receivers)], problem.slowness[np.ix_(receivers, senders)].T
    slowest = np.maximum(there, back)
    return spread(cost, np.where(np.isinf(slowest), np.inf, slowest * max(size, 1e-300)), flows, free)


def _transport(cost: Floats, out_of: Ints, into: Ints) -> Ints:
    """Flows [senders, receivers] with these sums and little cost in all."""
    cost = np.where(np.isfinite(cost), cost, 1e9)
    total = int(out_of.sum())
    if total > EXACT_PAIRING:
        return _greedy_transport(cost, out_of, into)
    rows, slots = np.repeat(np.arange(len(out_of)), out_of), np.repeat(np.arange(len(into)), into)
    _, columns = linear_sum_assignment(cost[rows][:, slots])
    flows = np.zeros(cost.shape, dtype=np.int64)
    np.add.at(flows, (rows, slots[columns]), 1)
    return flows


def _greedy_transport(cost: Floats, out_of: Ints, into: Ints) -> Ints:
    """Takes the cheapest pairs first, and from time to time drops pairs of which one side has nothing left."""
    waiting, free = out_of.copy(), into.copy()
    flows = np.zeros(cost.shape, dtype=np.int64)
    rows, columns = np.divmod(np.argsort(cost, axis=None, kind="stable"), cost.shape[1])
    while len(rows):
        for row, column in zip(rows[:4096].tolist(), columns[:4096].tolist(), strict=True):
            number = min(waiting[row], free[column])
            if number:
                flows[row, column] = number
                waiting[row] -= number
                free[column] -= number
        rows, columns = rows[4096:], columns[4096:]
        useful = (waiting[rows] > 0) & (free[columns] > 0)
        rows, columns = rows[useful], columns[useful]
    return flows
