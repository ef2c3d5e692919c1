"""All groups of a small cluster that can hold a stage within a given time, and the cheapest chain of them.

As in node_prices.py, every node has a price, all prices add up to 1, and a plan costs at most 1. Here groups are
whole; one thing is still relaxed: a node may be in several groups of a chain.
"""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.bound.capacity import Kinds
from dtfm.scheduler.bound.group import MEMBER, Setting, complete, gather, setting
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Floats, Ints, Problem
from dtfm.scheduler.model.tables import Tables, tables

STEP, SHORTER = 0.3, 0.95
"""Logarithm of the largest change of a price in one step, at first, and how much less after one that does not help."""
STEPS, PATIENCE = 100, 15
"""Largest number of changes of prices, in all, and of those in a row that do not help."""


class EveryGroup:
    """The groups that suffice for some kind of stage.

    ``group`` is int64 [groups], in order of their prices. ``deepest`` is int8 [kinds, groups]: the most stages that there can be
    from the group's stage to the last, 0 where the group does not suffice. ``price`` is float64 [groups]. ``before`` is float64
    [layers + 1, stages + 1], by layer and number of stages: the least price of groups for all layers before that layer when that
    many stages hold the rest. ``entries`` counts the groups of each kind that were priced: a measure of the work.
    """

    def __init__(self, problem: Problem, kinds: Kinds, seconds: float) -> None:
        self.problem, self.kinds, self.seconds = problem, kinds, seconds
        self.setting = setting(problem, kinds, seconds)
        self.most_stages = min(len(problem.flops), len(problem.activation))
        most = problem.workload.micro_batches
        held = [0.0] + [float(min(in_flight(0, depth), most)) for depth in range(1, self.most_stages + 1)]
        deepest = np.zeros((len(kinds.work), 1 << len(problem.flops)), np.int8)
        sufficient_groups(tables(problem), self.setting, np.array(held), deepest)
        self.group = np.flatnonzero(deepest.any(axis=0))
        self.deepest = np.ascontiguousarray(deepest[:, self.group])
        self._members = (self.group[:, None] >> np.arange(len(problem.flops))) % 2.0
        self.price = np.zeros(len(self.group))
        self.before = np.zeros((0, 0))
        self.entries = 0

    def priced(self, prices: Floats) -> Floats:
        """Prices with which the cheapest chain costs as much as possible, from these on. Sets price and before.

        No plan takes so little time when that is more than 1.
        """
        best, dearest, step, failures = prices, -1.0, STEP, 0
        for _ in range(STEPS):
            cost, asked = self._cheapest(prices)
            if cost > dearest:
                best, dearest, failures = prices, cost, 0
            else:
                step, failures = step * SHORTER, failures + 1
            if cost > 1 + 1e-6 or failures == PATIENCE:
                break
            excess = asked - 1
            prices = prices * np.exp(step * excess / max(1.0, float(np.abs(excess).max()))) + 1e-15
            prices /= prices.sum()
        self._cheapest(best)
        order = np.argsort(self.price, kind="stable")
        self.group, self.price, self._members = self.group[order], self.price[order], self._members[order]
        self.deepest = np.ascontiguousarray(self.deepest[:, order])
        return best

    @property
    def cost(self) -> float:
        """The least cost of a chain at the last prices."""
        return float(self.before[-1, 0])

    def _cheapest(self, prices: Floats) -> tuple[float, Floats]:
        """The cost of the cheapest chain, and how often it asks for each node. Sets price and before."""
        number, deepest = self.kinds.number, self.most_stages
        layers = len(number) - 1
        self.price = self._members @ prices
        self.entries += self.deepest.size
        least, which = cheapest_groups(self.deepest, self.price, deepest)
        before = np.full((layers + 1, deepest + 1), np.inf)
        before[0] = 0.0
        first = np.zeros(before.shape, dtype=np.int64)
        for layer in range(1, layers + 1):
            # Only the last stage has no stage behind it.
            for behind in range(1, deepest) if layer < layers else (0,):
                ways = least[number[:layer, layer], behind + 1] + before[:layer, behind + 1]
                first[layer, behind] = ways.argmin()
                before[layer, behind] = ways.min()
        self.before = before
        asked = np.zeros(len(prices))
        layer, behind = layers, 0
        while layer and np.isfinite(before[-1, 0]):
            begin = int(first[layer, behind])
            asked += self._members[which[number[begin, layer], behind + 1]]
            layer, behind = begin, behind + 1
        return float(before[-1, 0]), asked


@compiled
def sufficient_groups(t: Tables, s: Setting, held: Floats, deepest: np.ndarray) -> None:
    """Fills in ``deepest``, int8 [kinds, 2 ** nodes]. ``held`` is the least micro-batches in flight, by stages to the last."""
    members = np.zeros(len(t.link), MEMBER)
    for group in range(1, deepest.shape[1]):
        count, slowest = gather(t, group, members)
        if not slowest < np.inf:
            continue
        room = np.inf
        for member in members[:count]:
            room = min(room, t.node[member.node].memory)
        for number in range(len(s.kind)):
            kind, depth = s.kind[number], 0
            if kind.last:
                depth = 1 if kind.state + held[1] * kind.kept <= room + 1 else 0
            else:
                while depth + 1 < len(held) and kind.state + held[depth + 1] * kind.kept <= room + 1:
                    depth += 1
            if depth > (0 if kind.last else 1) and complete(t, s, members, count, slowest, number) >= t.micro_batches:
                deepest[number, group] = depth


@compiled
def cheapest_groups(deepest: np.ndarray, price: Floats, most: int) -> tuple[Floats, Ints]:
    """The least price of a group for each kind and each number of stages to the last, and the group's place: float64 and int64
    [kinds, most + 2]; infinite where there is none."""
    least = np.full((len(deepest), most + 2), np.inf)
    which = np.zeros(least.shape, np.int64)
    for kind in range(len(deepest)):
        for place in range(len(price)):
            depth = deepest[kind, place]
            if depth and price[place] < least[kind, depth]:
                least[kind, depth], which[kind, depth] = price[place], place
        for depth in range(most - 1, 0, -1):
            if least[kind, depth + 1] < least[kind, depth]:
                least[kind, depth], which[kind, depth] = least[kind, depth + 1], which[kind, depth + 1]
    return least, which
