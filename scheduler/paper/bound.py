"""A certified lower bound on the paper's cost: what no choice of groups and order can undercut.

The argument. Take a cost w, and the islands: sets of nodes joined by exchanges cheaper than w. A boundary between two
stages that costs less than w pairs every node with one of its own island; so both groups have the same number of members in
every island. Hence, where all but r - 1 boundaries cost less than w, the pipeline falls into r segments of equally composed
groups, and a segment of l stages needs paths of l nodes inside islands. Two things follow:

* Nodes in islands of at most x nodes sit in segments of at most x stages. That bounds r from below.
* With few segments, each must draw on many islands, so some group has few members in one of them, and these members exchange
  gradients with many nodes elsewhere. That bounds the data-parallel cost from below; for r = 1 the composition is known.

Every w gives a bound: the cheapest r. The largest of them counts. All nodes must take part for the argument to hold; where
some stay idle only the sums of cheapest links remain.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from scipy.sparse.csgraph import connected_components

from dtfm.scheduler.model.problem import Floats, Ints, Problem
from dtfm.scheduler.paper.cost import activation_exchange, gradient_exchange

MOST_LEVELS = 64
"""Values of w that are tried; any subset of them gives a valid bound."""


def paper_bound(problem: Problem) -> float:
    """Seconds that no plan of the workload's ``paper`` stages and replicas can undercut in the paper's model."""
    costs = problem.workload.paper
    assert costs is not None
    gradients, activations = gradient_exchange(problem, costs), activation_exchange(problem, costs)
    stages, replicas, nodes = costs.stages, costs.replicas, len(gradients)
    off_diagonal = ~np.eye(nodes, dtype=bool)
    cheapest = float(activations[off_diagonal].min(initial=np.inf)) if stages > 1 else 0.0
    # The best company that each node could have; of the nodes in use, one of the worst stands for a group.
    company = np.sort(np.where(off_diagonal, gradients, np.inf), axis=1)[:, : replicas - 1].sum(axis=1)
    group = float(np.sort(company)[stages * replicas - 1])
    bound = group + (stages - 1) * cheapest
    if nodes == stages * replicas and stages > 1:
        levels = []
        for weight in _levels(activations):
            islands = connected_components(activations < weight, directed=False)[1]
            levels.append((weight, islands, _least_segments(islands, stages, replicas)))
        for weight, islands, least in levels:
            best = math.inf
            for segments in range(least, stages + 1):
                here = max(group, _group_bound(gradients, islands, stages, replicas, segments))
                best = min(best, here + _pipeline_bound(levels, stages, cheapest, weight, segments))
            bound = max(bound, best)
    return bound * (1.0 - 1e-12)  # sums in another order round otherwise


def _levels(activations: Floats) -> list[float]:
    """The costs at which islands merge: single-linkage heights, the least edges of a spanning tree (Prim)."""
    nodes = len(activations)
    nearest = activations[0].copy()
    outside = np.ones(nodes, dtype=bool)
    outside[0] = False
    heights = set()
    for _ in range(nodes - 1):
        node = int(np.where(outside, nearest, np.inf).argmin())
        if not outside[node]:
            break  # the rest cannot be reached
        heights.add(float(nearest[node]))
        outside[node] = False
        nearest = np.minimum(nearest, activations[node])
    levels = sorted(heights)
    return [levels[i] for i in np.unique(np.linspace(0, len(levels) - 1, MOST_LEVELS).astype(int))] if levels else []


def _least_segments(islands: Ints, stages: int, replicas: int) -> int:
    """How many segments there are at least: every stage counts as one over the longest segment that it can be in."""
    sizes = np.bincount(islands)
    in_islands = Counter(sizes.tolist())
    parts, placed, nodes = 0.0, 0, 0
    for size in sorted(in_islands):
        nodes += size * in_islands[size]
        # So many stages are in segments of at most `size`, since each of them has no more than `replicas` nodes.
        here = math.ceil(nodes / replicas)
        parts += (here - placed) / min(size, stages)
        placed = here
    least = math.ceil(parts - 1e-9)
    return max(least, 2) if (sizes % stages).any() else least


def _group_bound(gradients: Floats, islands: Ints, stages: int, replicas: int, segments: int) -> float:
    """Data-parallel seconds of the worst group at least, given so many segments."""
    sizes = np.bincount(islands)
    if segments == 1:
        own = np.zeros(len(gradients))
        for island, members in enumerate(sizes // stages):
            inside = islands == island
            toward = np.sort(gradients[:, inside], axis=1)  # a node's own 0 comes first inside its island
            own += toward[:, :members].sum(axis=1)
        return float(own.max())
    most = replicas // math.ceil(len(sizes) / segments)
    least = math.inf
    for island in range(len(sizes)):
        inside = islands == island
        mine = _running(gradients[np.ix_(inside, inside)])
        others = _running(np.insert(gradients[np.ix_(inside, ~inside)], 0, 0.0, axis=1))
        for members in range(max(1, replicas + 1 - others.shape[1]), min(most, mine.shape[1]) + 1):
            least = min(least, float((mine[:, members - 1] + others[:, replicas - members]).min()))
    return least


def _running(costs: Floats) -> Floats:
    """Column c: per row the sum of its c + 1 cheapest entries."""
    return np.asarray(np.cumsum(np.sort(costs, axis=1), axis=1))


def _pipeline_bound(
    levels: list[tuple[float, Ints, int]], stages: int, cheapest: float, weight: float, segments: int
) -> float:
    """Pipeline seconds when ``segments`` - 1 boundaries cost ``weight`` or more, and every level's least segments hold."""
    dearest = np.full(stages - 1, cheapest)
    for level, _, least in levels:
        dearest[: least - 1] = np.maximum(dearest[: least - 1], level)
    dearest[: segments - 1] = np.maximum(dearest[: segments - 1], weight)
    return float(dearest.sum())
