"""The cheapest chain of stages from layer 0 to the last, when every node has a price.

A stage costs as much as the cheapest replica group that can complete all micro-batches. The cheapest group is found as a
fractional knapsack: parts of nodes may be taken, which can only make it cheaper. That a group has at most n nodes is relaxed as
well: every replica pays a fee, and the group gets n fees back.

Where a small stage is beside another small stage, a node has few links to exchange activations over. So the cost of a stage
depends on the sizes of both neighbours, in the ranges NEIGHBOURS. It takes longer to compute. Therefore stages are first priced
without; only those that a path of a cost of at most 1 may contain are priced again for all sizes of their neighbours.
"""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.bound.capacity import Capacities, Table
from dtfm.scheduler.model.problem import Floats, Ints

NEIGHBOURS = (1, 2, 3, 5, 1_000_000)
"""The largest number of nodes in each range of sizes of a stage's neighbours."""
FEES = (0.0, 0.5, 2.0, 8.0)
"""Fees that are tried, in mean prices of a node."""
FEW = 8
"""Largest group size for which fees are tried."""


class CheapestPath:
    """One search, at one choice of prices; ``neighbours``: with regard to the sizes of neighbours."""

    def __init__(self, capacities: Capacities, table: Table, prices: Floats, neighbours: bool) -> None:
        self._capacities, self._table, self._prices = capacities, table, prices
        self._sizes = NEIGHBOURS if neighbours else NEIGHBOURS[-1:]
        self._any = len(self._sizes) - 1
        self._total = float(capacities.problem.workload.micro_batches)
        self._number = capacities.kinds.number
        stages = np.arange(capacities.most_stages + 1)
        self._depth_of = np.searchsorted(capacities.depths, stages, side="right") - 1
        self.entries = 0
        """Number of table entries priced so far: a measure of the work."""

    def find(self) -> tuple[float, Floats]:
        """The least cost of a path, and how often the path asks for each node; infinite where there is no path. Only costs up
        to 1 are exact: of paths that cost more it is only certain that they do."""
        table = self._table
        self.entries += table.most.size
        costs, fees = group_costs(table.most, table.replicas, self._prices, self._total)
        best = np.full(self._capacities.same.shape, np.inf)  # [depths, kinds]
        np.minimum.at(best, (table.depth, table.kind), costs)
        self._repeat(best)
        before, behind = self._ways(best)
        if behind[0] > 1 + 1e-6:
            return float(behind[0]), np.zeros(len(self._prices))
        first, past_last = np.nonzero(self._number >= 0)
        rest = np.full(len(self._capacities.kinds.work), np.inf)
        np.minimum.at(rest, self._number[first, past_last], before[first] + behind[past_last])
        again = np.flatnonzero(costs + rest[table.kind] <= 1 + 1e-6)
        return self._beside_each_other(costs, fees, again)

    def _repeat(self, best: Floats | Ints) -> None:
        """Fills in the kinds that are at a depth as at the one before."""
        for depth in range(1, len(best)):
            same = self._capacities.same[depth]
            best[depth, same] = best[depth - 1, same]

    def _ways(self, best: Floats) -> tuple[Floats, Floats]:
        """The least costs from layer 0 to each layer, and from each layer to the end, each with any number of stages."""
        layers = len(self._number) - 1
        by_depth = np.where(self._number >= 0, best[:, self._number], np.inf)
        onward = np.full(layers + 1, np.inf)
        onward[layers] = 0.0
        behind = onward.copy()
        for depth in self._depth_of[1:]:
            onward = (by_depth[depth] + onward).min(axis=1)
            behind = np.minimum(behind, onward)
        before = np.full(layers + 1, np.inf)
        before[0] = 0.0
        least = by_depth.min(axis=0)
        for layer in range(1, layers + 1):
            before[layer] = (before[:layer] + least[:layer, layer]).min()
        return before, behind

    def _beside_each_other(self, costs: Floats, fees: Floats, again: Ints) -> tuple[float, Floats]:
        """The cheapest path with regard to the sizes of neighbours, for the rows ``again`` alone."""
        table, ranges = self._table, len(self._sizes)
        own = np.searchsorted(self._sizes, table.replicas)
        # [depths, kinds, range of the stage before, own range, range of the stage behind]
        best = np.full((*self._capacities.same.shape, ranges, ranges, ranges), np.inf)
        choice = np.full(best.shape, -1)
        found: list[tuple[Ints, Floats, int, int]] = []
        known = 0
        kinds = self._capacities.kinds
        for before, most_before in enumerate(self._sizes):
            for behind, most_behind in enumerate(self._sizes):
                rows = again
                # At the ends of the model there is no neighbour, which counts as any number of nodes.
                if before != self._any:
                    rows = rows[~kinds.first[table.kind[rows]]]
                if behind != self._any:
                    rows = rows[~kinds.last[table.kind[rows]]]
                at_cost, at_fee = costs[rows], fees[rows]
                if (before != self._any or behind != self._any) and len(rows):
                    most = self._capacities.beside(table, rows, most_before, most_behind)
                    changed = np.flatnonzero((most < table.most[rows]).any(axis=1))
                    enough = _largest(most[changed], table.replicas[rows[changed]]) >= self._total
                    at_cost, at_fee = at_cost.copy(), at_fee.copy()
                    at_cost[changed[~enough]] = np.inf
                    changed = changed[enough]
                    self.entries += most[changed].size
                    if len(changed):
                        replicas = table.replicas[rows[changed]]
                        at_cost[changed], at_fee[changed] = group_costs(
                            most[changed], replicas, self._prices, self._total
                        )
                order = np.argsort(-at_cost, kind="stable")
                at = table.depth[rows[order]], table.kind[rows[order]], before, own[rows[order]], behind
                best[at], choice[at] = at_cost[order], known + order
                found.append((rows, at_fee, before, behind))
                known += len(rows)
        self._repeat(best)
        self._repeat(choice)
        return self._walk(best, choice, found)

    def _walk(self, best: Floats, choice: Ints, found: list[tuple[Ints, Floats, int, int]]) -> tuple[float, Floats]:
        """The cheapest path, and how often it asks for each node."""
        layers, ranges = len(self._number) - 1, len(self._sizes)
        # [range of the stage before, own range, layer]: from the layer to the end.
        onward = np.full((layers + 1, ranges, ranges), np.inf)
        onward[layers, :, self._any] = 0.0
        moves, cost, count = [], np.inf, 0
        missing = (self._number < 0)[:, :, None, None, None]
        for stages, depth in enumerate(self._depth_of[1:], start=1):
            ways = np.where(missing, np.inf, best[depth][self._number]) + onward[None, :, None]
            ways = ways.transpose(0, 2, 3, 1, 4).reshape(layers + 1, ranges, ranges, -1)
            moves.append(ways.argmin(axis=3))
            onward = np.take_along_axis(ways, moves[-1][..., None], axis=3)[..., 0]
            if onward[0, self._any].min() < cost:
                cost, count, size = float(onward[0, self._any].min()), stages, int(onward[0, self._any].argmin())
        asked = np.zeros(len(self._prices))
        starts = np.cumsum([0, *(len(rows) for rows, *_ in found)])
        first, before = 0, self._any
        for stages in range(count, 0, -1):
            past_last, behind = divmod(int(moves[stages - 1][first, before, size]), ranges)
            taken = int(choice[self._depth_of[stages], self._number[first, past_last], before, size, behind])
            part = int(np.searchsorted(starts, taken, side="right")) - 1
            rows, fees, *_ = found[part]
            place = taken - starts[part]
            row = rows[place : place + 1]
            most = self._table.most[row[0]]
            if before != self._any or behind != self._any:
                most = self._capacities.beside(self._table, row, self._sizes[before], self._sizes[behind])[0]
            asked += parts_taken(most, self._prices + fees[place], self._total)
            first, before, size = past_last, size, behind
        return cost, asked


def _largest(most: Floats, replicas: Ints) -> Floats:
    """The sum of each row's ``replicas`` largest entries."""
    ranked = np.cumsum(-np.sort(-most, axis=1), axis=1)
    return np.asarray(ranked[np.arange(len(most)), np.minimum(replicas, most.shape[1]) - 1])


def group_costs(most: Floats, replicas: Ints, prices: Floats, total: float) -> tuple[Floats, Floats]:
    """For each row the least cost of a group, and the fee with which it was found."""
    costs = _knapsacks(most, prices, total)
    fees = np.zeros(len(costs))
    few = np.flatnonzero(replicas <= FEW)
    for factor in FEES[1:]:
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


def parts_taken(most: Floats, prices: Floats, total: float) -> Floats:
    """The part of each node that the cheapest group takes."""
    order = np.argsort(np.divide(prices, most, out=np.full(len(most), np.inf), where=most > 0))
    ranked = most[order]
    parts = np.zeros(len(most))
    parts[order] = np.clip(total - (np.cumsum(ranked) - ranked), 0.0, ranked) / np.maximum(ranked, 1.0)
    return parts
