"""A certified lower bound on the paper's cost over all choices of groups and their order.

Take a cost w, and the neighbourhoods: sets of nodes connected by exchanges of activations cheaper than w. A boundary between
two stages that costs less than w pairs every node with one of its own neighbourhood. So both groups have the same number of
members in every neighbourhood. If all but r - 1 boundaries cost less than w, the pipeline falls into r segments of equally
composed groups. A segment of l stages needs paths of l nodes inside neighbourhoods. Two things follow:

* Nodes in neighbourhoods of at most x nodes are in segments of at most x stages. That bounds r from below.
* With few segments, each must draw on many neighbourhoods. Then some group has few members in one of them, and these members
  exchange gradients with many nodes elsewhere. That bounds the data-parallel cost from below. For r = 1 the composition is known.

Every w gives a bound, by the cheapest r. The largest of these bounds counts. All this needs every node to take part. Where
some stay idle, only the sums of the cheapest links remain.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from scipy.sparse.csgraph import connected_components

from dtfm.scheduler.model.problem import Floats, Ints, Problem

MOST_LEVELS = 64
"""Largest number of values of w that are tried; any subset of them gives a valid bound."""
ROUNDING = 1e-12
"""The part of the bound that is left out: others add up the same terms in another order."""


def paper_bound(problem: Problem) -> float:
    """Lower bound, in the paper's seconds, on every plan with the workload's ``paper`` stages and replicas."""
    costs = problem.workload.paper
    assert costs is not None
    gradients, activations = problem.paper_exchanges()
    stages, replicas, nodes = costs.stages, costs.replicas, len(gradients)
    off_diagonal = ~np.eye(nodes, dtype=bool)
    cheapest = float(activations[off_diagonal].min(initial=np.inf)) if stages > 1 else 0.0
    # Each node's cheapest possible group. Of the nodes in use, the worst decides.
    company = np.sort(np.where(off_diagonal, gradients, np.inf), axis=1)[:, : replicas - 1].sum(axis=1)
    group = float(np.sort(company)[stages * replicas - 1])
    bound = group + (stages - 1) * cheapest
    if nodes == stages * replicas and stages > 1:
        levels = []
        for weight in _levels(activations):
            of = connected_components(activations < weight, directed=False)[1]
            levels.append((weight, of, _least_segments(of, stages, replicas)))
        for weight, of, least in levels:
            best = math.inf
            for segments in range(least, stages + 1):
                here = max(group, _group_bound(gradients, of, stages, replicas, segments))
                best = min(best, here + _pipeline_bound(levels, stages, cheapest, weight, segments))
            bound = max(bound, best)
    return bound * (1.0 - ROUNDING)


def _levels(activations: Floats) -> list[float]:
    """The costs where neighbourhoods merge: single-linkage heights, the edges of a minimum spanning tree (Prim)."""
    nodes = len(activations)
    nearest = activations[0].copy()
    outside = np.ones(nodes, dtype=bool)
    outside[0] = False
    heights = set()
    for _ in range(nodes - 1):
        node = int(np.where(outside, nearest, np.inf).argmin())
        if not outside[node] or not math.isfinite(nearest[node]):
            break  # the remaining nodes cannot be reached
        heights.add(float(nearest[node]))
        outside[node] = False
        nearest = np.minimum(nearest, activations[node])
    levels = sorted(heights)
    return [levels[i] for i in np.unique(np.linspace(0, len(levels) - 1, MOST_LEVELS).astype(int))] if levels else []


def _least_segments(of: Ints, stages: int, replicas: int) -> int:
    """The least possible number of segments: every stage counts as one over the longest segment that it can be in.

    ``of`` is the neighbourhood of each node.
    """
    sizes = np.bincount(of)
    neighbourhoods = Counter(sizes.tolist())
    parts, placed, nodes = 0.0, 0, 0
    for size in sorted(neighbourhoods):
        nodes += size * neighbourhoods[size]
        # The number of stages in segments of at most `size`, since each of them has at most `replicas` nodes.
        here = math.ceil(nodes / replicas)
        parts += (here - placed) / min(size, stages)
        placed = here
    least = math.ceil(parts - 1e-9)
    return max(least, 2) if (sizes % stages).any() else least


def _group_bound(gradients: Floats, of: Ints, stages: int, replicas: int, segments: int) -> float:
    """Lower bound on the worst group's data-parallel seconds, given the number of segments."""
    sizes = np.bincount(of)
    if segments == 1:
        own = np.zeros(len(gradients))
        for neighbourhood, members in enumerate(sizes // stages):
            toward = np.sort(gradients[:, of == neighbourhood], axis=1)  # in a node's own, its 0 to itself comes first
            own += toward[:, :members].sum(axis=1)
        return float(own.max())
    most = replicas // math.ceil(len(sizes) / segments)
    least = math.inf
    for neighbourhood in range(len(sizes)):
        inside = of == neighbourhood
        mine = _running(gradients[np.ix_(inside, inside)])
        others = _running(np.insert(gradients[np.ix_(inside, ~inside)], 0, 0.0, axis=1))
        for members in range(max(1, replicas + 1 - others.shape[1]), min(most, mine.shape[1]) + 1):
            least = min(least, float((mine[:, members - 1] + others[:, replicas - members]).min()))
    return least


def _running(costs: Floats) -> Floats:
    """Column c is, for each row, the sum of its c + 1 cheapest entries."""
    return np.asarray(np.cumsum(np.sort(costs, axis=1), axis=1))


def _pipeline_bound(
    levels: list[tuple[float, Ints, int]], stages: int, cheapest: float, weight: float, segments: int
) -> float:
    """Pipeline seconds when ``segments`` - 1 boundaries cost at least ``weight`` and every level's least segments hold."""
    dearest = np.full(stages - 1, cheapest)
    for level, _, least in levels:
        dearest[: least - 1] = np.maximum(dearest[: least - 1], level)
    dearest[: segments - 1] = np.maximum(dearest[: segments - 1], weight)
    return float(dearest.sum())
