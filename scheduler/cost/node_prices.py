"""Whether the nodes suffice for a plan of a given time: a Lagrangean relaxation with a price per node.

Give every node a price, any number that is not negative, so that all prices add up to 1. A plan uses each node at most once,
so it costs at most 1. On the other hand it costs at least as much as the shortest path from layer 0 to the last, where
passing the layers [a, b) costs as much as the cheapest replica group that can complete all micro-batches there. If the
shortest path costs more than 1, there is no such plan. This is true for any prices. Good ones are found step by step: a node
that the path asks for more than once becomes dearer, a node that it does not ask for becomes cheaper.

The cheapest group is found as a fractional knapsack: parts of nodes may be taken, which can only make it cheaper. That a group
of a table's row has at most n nodes is relaxed as well: every replica pays a fee, and the group gets n fees back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dtfm.scheduler.cost.capacity import Capacities, Kinds, Table
from dtfm.scheduler.model.problem import Floats, Problem

FEES = (0.0, 0.5, 2.0, 8.0)
"""Fees that are tried, in mean prices of a node."""
FEW = 8
"""Largest group size for which fees are tried."""
STEP = 0.3
"""Logarithm of the largest change of a price in one step, at first; SHORTER times that after each step without success."""
SHORTER = 0.97
PATIENCE = 12
"""Steps without success after which a shorter time is tried."""
HOPELESS = 0.5
"""Cost of a path below which a shorter time is tried at once."""
GROWTH = 1.5
"""Largest quotient of two times that are tried one after the other."""
CLOSE = 1.004
"""The search ends when the time that is tried is within this factor of a time that is ruled out."""


def ruled_out(problem: Problem, seconds: float, steps: int, entries: float) -> Iterator[float]:
    """Ever larger numbers of seconds, above ``seconds``, within which no plan can end.

    Stops after ``steps`` steps, after as many steps as handle ``entries`` entries of tables, when there is little left to
    gain, or, if no plan exists, at some point.
    """
    capacities = Capacities(problem, Kinds.of(problem))
    reached, tried, failures, step = seconds, seconds * math.sqrt(GROWTH), 0, STEP
    table, prices, demand = capacities.table(tried), None, np.zeros(len(problem.flops))
    for _ in range(steps):
        cost, asked = math.inf, demand
        if table is not None:
            entries -= table.most.size
            prices = first_prices(table) if prices is None else prices
            cost, asked = shortest_path(capacities, table, prices)
        if cost > 1 + 1e-6:
            yield tried
            if tried > 1e9 * seconds:
                return  # no plan exists
            reached, failures, step = tried, 0, max(step, STEP / 2)
            tried *= min(max(cost, CLOSE), GROWTH)
            demand = np.zeros(len(problem.flops))
        else:
            failures += 1
            demand += asked
            # If no node is asked for more than once on average, no prices will do.
            if failures == PATIENCE or cost < HOPELESS or demand.max() <= failures:
                failures, tried = 0, math.sqrt(reached * tried)
                demand[:] = 0.0
                if tried < reached * CLOSE:
                    return
        if entries < 0:
            return
        if cost <= 1 + 1e-6:
            excess = asked - 1
            prices = prices * np.exp(step * excess / max(1.0, float(np.abs(excess).max())))
            prices /= prices.sum()
            step *= SHORTER
        if failures == 0:
            table = capacities.table(tried)


def first_prices(table: Table) -> Floats:
    """Each node's share of what all nodes can complete, on average over all rows."""
    prices = (table.most / table.most.sum(axis=1, keepdims=True)).mean(axis=0) + 1e-9
    return np.asarray(prices / prices.sum())


def shortest_path(capacities: Capacities, table: Table, prices: Floats) -> tuple[float, Floats]:
    """The least cost of a path, and how often the path asks for each node; infinite where there is no path."""
    same, number = capacities.same, capacities.kinds.number
    layers, most_stages = len(number) - 1, capacities.most_stages
    total = float(capacities.problem.workload.micro_batches)
    costs, fees = _costs(table, prices, total)
    order = np.argsort(-costs, kind="stable")
    best, row = np.full(same.shape, np.inf), np.full(same.shape, -1)  # [depths, kinds]
    at = table.depth[order], table.kind[order]
    best[at], row[at] = costs[order], order
    for depth in range(1, len(best)):
        best[depth] = np.where(same[depth], best[depth - 1], best[depth])
        row[depth] = np.where(same[depth], row[depth - 1], row[depth])
    # [stages, layer]: from the layer to the end with that number of stages.
    onward = np.full((most_stages + 1, layers + 1), np.inf)
    onward[0, layers] = 0.0
    choices = np.zeros(onward.shape, dtype=np.int64)
    by_depth = np.where(number >= 0, best[:, number], np.inf)
    depth_of = np.searchsorted(capacities.depths, np.arange(most_stages + 1), side="right") - 1
    for stages in range(1, most_stages + 1):
        ways = by_depth[depth_of[stages]] + onward[stages - 1]
        choices[stages] = ways.argmin(axis=1)
        onward[stages] = np.take_along_axis(ways, choices[stages, :, None], axis=1)[:, 0]
    asked = np.zeros(len(prices))
    count = int(onward[:, 0].argmin())
    cost, first = float(onward[count, 0]), 0
    for stages in range(count if np.isfinite(cost) else 0, 0, -1):
        past_last = int(choices[stages, first])
        taken = int(row[depth_of[stages], number[first, past_last]])
        asked += _parts(table.most[taken], prices + fees[taken], total)
        first = past_last
    return cost, asked


def _costs(table: Table, prices: Floats, total: float) -> tuple[Floats, Floats]:
    """For each row the least cost of a group, and the fee with which it was found."""
    costs = _knapsacks(table.most, prices, total)
    fees = np.zeros(len(costs))
    few = np.flatnonzero(table.replicas <= FEW)
    for factor in FEES[1:]:
        fee = factor * float(prices.mean())
        dearer = _knapsacks(table.most[few], prices + fee, total) - fee * table.replicas[few]
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


def _parts(most: Floats, prices: Floats, total: float) -> Floats:
    """The part of each node that the cheapest group takes."""
    order = np.argsort(np.divide(prices, most, out=np.full(len(most), np.inf), where=most > 0))
    ranked = most[order]
    parts = np.zeros(len(most))
    parts[order] = np.clip(total - (np.cumsum(ranked) - ranked), 0.0, ranked) / np.maximum(ranked, 1.0)
    return parts
