"""Whether the nodes suffice for a plan of a given time: a Lagrangean relaxation with a price per node.

Give every node a price, any number that is not negative, so that all prices add up to 1. A plan uses each node at most once,
so it costs at most 1. On the other hand it costs at least as much as the shortest path from layer 0 to the last, where
passing the layers [a, b) costs as much as the cheapest replica group that can complete all micro-batches there. If the
shortest path costs more than 1, there is no such plan. This is true for any prices. Good ones are found step by step: a node
that the path asks for more than once becomes dearer, a node that it does not ask for becomes cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dtfm.scheduler.bound.capacity import Capacities, Table
from dtfm.scheduler.bound.cheapest_path import cheapest_path
from dtfm.scheduler.model.problem import Floats, Problem

STEP = 0.3
"""Logarithm of the largest change of a price in one step, at first; SHORTER times that where a step does not help."""
SHORTER = 0.93
PATIENCE = 8
"""Steps that do not make the path dearer after which a shorter time is tried."""
HOPE, LESS = 0.2, 0.9
"""A shorter time is also tried when after n steps the path is cheaper than 1 - HOPE * LESS**n."""
GROWTH = 1.5
"""Largest quotient of two times that are tried one after the other."""
CLOSE = 1.004
"""The search ends when the time that is tried is within this factor of a time that is ruled out."""


def ruled_out(problem: Problem, seconds: float, steps: int, entries: float) -> Iterator[float]:
    """Numbers of seconds, never smaller than the one before, within which no plan can end; the first is ``seconds``.

    Where the path costs more than 1, a longer time is tried next. Otherwise the prices change. When that does not help, or not
    soon enough, a shorter time is tried. Ends after ``steps`` steps, when there is little left to gain, or when ``entries``
    entries of tables are priced. One can stop after each step.
    """
    capacities, nodes = Capacities(problem), len(problem.flops)
    most, growth, step, tried = 1e9 * seconds, GROWTH, STEP, seconds * GROWTH
    table, stay, prices = capacities.table(tried), _Stay(nodes), np.zeros(0)
    for _ in range(steps):
        yield seconds
        if entries < 0 or tried < seconds * CLOSE or seconds > most:
            return
        cost, asked = math.inf, np.zeros(nodes)
        if table is not None:
            if not len(prices):
                prices = _first_prices(table)
            cost, asked = cheapest_path(capacities, table, prices)
            entries -= table.most.size
        if cost > 1 + 1e-6:
            seconds, step = tried, max(step, STEP / 3)
            yield tried
            tried *= min(max(cost, growth), GROWTH)
            growth = min(growth**1.5, GROWTH)
        else:
            if not stay.note(cost, asked, prices):
                step *= SHORTER
            excess = asked - 1
            prices = prices * np.exp(step * excess / max(1.0, float(np.abs(excess).max()))) + 1e-15
            prices /= prices.sum()
            if stay.hopeful:
                continue
            if stay.failures == PATIENCE:
                prices = stay.best_prices
            tried, growth = math.sqrt(seconds * tried), max(math.sqrt(growth), CLOSE)
        table, stay = capacities.table(tried), _Stay(nodes)


class _Stay:
    """What the steps at one number of seconds have shown."""

    def __init__(self, nodes: int) -> None:
        self.failures, self.best_prices = 0, np.zeros(nodes)
        self._best, self._steps, self._demand = 0.0, 0, np.zeros(nodes)

    def note(self, cost: float, asked: Floats, prices: Floats) -> bool:
        """Notes a step; returns whether the path became dearer than ever."""
        self._steps, self._demand = self._steps + 1, self._demand + asked
        if cost <= self._best:
            self.failures += 1
            return False
        self._best, self.best_prices, self.failures = cost, prices, 0
        return True

    @property
    def hopeful(self) -> bool:
        """Whether further steps might make the path dearer than 1. If no node is asked for more than once on average, no
        prices can."""
        soon = self._best > 1 - HOPE * LESS**self._steps
        return self.failures < PATIENCE and soon and bool(self._demand.max() > self._steps)


def _first_prices(table: Table) -> Floats:
    """Each node's share of what all nodes can complete, on average over all rows."""
    prices = (table.most / table.most.sum(axis=1, keepdims=True)).mean(axis=0) + 1e-9
    return np.asarray(prices / prices.sum())
