"""The cheapest chain of stages from layer 0 to the last, when every node has a price.

A stage costs as much as the cheapest replica group that can complete all micro-batches. The cheapest group is found as a
fractional knapsack: parts of nodes may be taken, which can only make it cheaper. That a group has at most n nodes is relaxed as
well: every replica pays a fee, and the group gets n fees back.
"""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.bound.capacity import Capacities, Table
from dtfm.scheduler.model.problem import Floats, Ints

FEES = (0.5, 2.0, 8.0)
"""Fees that are tried beside none, in mean prices of a node."""
FEW = 8
"""Largest group size for which fees are tried."""


def cheapest_path(capacities: Capacities, table: Table, prices: Floats) -> tuple[float, Floats]:
    """The least cost of a path, infinite where there is none, and how often the path asks for each node."""
    total, number = float(capacities.problem.workload.micro_batches), capacities.kinds.number
    costs, fees = _group_costs(table.most, table.replicas, prices, total)
    best, choice = np.full(capacities.same.shape, np.inf), np.full(capacities.same.shape, -1)  # [depths, kinds]
    order = np.argsort(-costs, kind="stable")
    at = table.depth[order], table.kind[order]
    best[at], choice[at] = costs[order], order  # the cheapest comes last
    for depth in range(1, len(best)):
        same = capacities.same[depth]
        best[depth, same], choice[depth, same] = best[depth - 1, same], choice[depth - 1, same]
    by_depth = np.where(number >= 0, best[:, number], np.inf)
    depth_of = np.searchsorted(capacities.depths, np.arange(capacities.most_stages + 1), side="right") - 1
    onward = np.append(np.full(len(number) - 1, np.inf), 0.0)  # from each layer to the end
    moves, cost, count = [], np.inf, 0
    for stages in range(1, capacities.most_stages + 1):
        ways = by_depth[depth_of[stages]] + onward
        moves.append(ways.argmin(axis=1))
        onward = ways.min(axis=1)
        if onward[0] < cost:
            cost, count = float(onward[0]), stages
    asked, first = np.zeros(len(prices)), 0
    for stages in range(count, 0, -1):
        past_last = moves[stages - 1][first]
        row = choice[depth_of[stages], number[first, past_last]]
        asked += _parts_taken(table.most[row], prices + fees[row], total)
        first = past_last
    return cost, asked


def _group_costs(most: Floats, replicas: Ints, prices: Floats, total: float) -> tuple[Floats, Floats]:
    """For each row the least cost of a group, and the fee with which it was found."""
    costs = _knapsacks(most, prices, total)
    fees = np.zeros(len(costs))
    few = np.flatnonzero(replicas <= FEW)
    for factor in FEES:
        fee = factor * float(prices.mean())
        dearer = _knapsacks(most[few], prices + fee, total) - fee * replicas[few]
        better = dearer > costs[few]
        costs[few[better]], fees[few[better]] = dearer[better], fee
    return costs, fees


def _knapsacks(most: Floats, prices: Floats, total: float) -> Floats:
    """For each row the least sum of prices of parts of nodes that together complete all micro-batches."""
    each = np.divide(prices, most, out=np.full(most.shape, np.inf), where=most > 0)
    order = np.argsort(each, axis=1)
    enough = (np.cumsum(np.take_along_axis(most, order, axis=1), axis=1) >= total).argmax(axis=1)
    rows = np.arange(len(most))
    # The dual: any price per micro-batch gives a lower bound; this one, of the last node that is taken, gives the best.
    per = each[rows, order[rows, enough]]
    return np.asarray(per * total - np.maximum(per[:, None] * most - prices, 0.0).sum(axis=1))


def _parts_taken(most: Floats, prices: Floats, total: float) -> Floats:
    """The part of each node that the cheapest group takes."""
    order = np.argsort(np.divide(prices, most, out=np.full(len(most), np.inf), where=most > 0))
    ranked = most[order]
    parts = np.zeros(len(most))
    parts[order] = np.clip(total - (np.cumsum(ranked) - ranked), 0.0, ranked) / np.maximum(ranked, 1.0)
    return parts
