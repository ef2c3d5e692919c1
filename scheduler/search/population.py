"""The layouts that a search keeps: survivors, children, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.population import Island, Member
from dtfm.scheduler.model.problem import Groups, Ints
from dtfm.scheduler.model.sketch import NO_LINK
from dtfm.scheduler.search.anneal import Found
from dtfm.scheduler.search.crossover import Parent, crossed

MOST = 10
"""Largest number of members."""
ALIKE = 0.9
"""Two members that have more than this in common are not both kept."""


def named(cluster: Cluster, groups: Groups, cuts: tuple[int, ...]) -> Member:
    """The member with these groups and cuts, which has one island."""
    ids = cluster.ids
    return Member((Island(tuple(tuple(ids[node] for node in group) for group in groups), cuts),))


def survivors(found: Iterable[Found], nodes: int, most: int = MOST) -> list[Found]:
    """The best layouts that work, the best first: each differs from all before it."""
    kept: list[Found] = []
    layers: list[Ints] = []
    for one in sorted(found, key=lambda one: (one.price, one.groups, one.cuts)):
        if one.price >= NO_LINK or len(kept) == most:
            break
        own = held(one.groups, one.cuts, nodes)
        if all(in_common(own, other) <= ALIKE for other in layers):
            kept.append(one)
            layers.append(own)
    return kept


def held(groups: Groups, cuts: tuple[int, ...], nodes: int) -> Ints:
    """The layers of each node, [first, past last): int64 [2, nodes]; both are 0 for an idle node."""
    layers = np.zeros((2, nodes), dtype=np.int64)
    for stage, group in enumerate(groups):
        layers[0, list(group)], layers[1, list(group)] = cuts[stage], cuts[stage + 1]
    return layers


def in_common(one: Ints, other: Ints) -> float:
    """Of all pairs of a node and a layer that it has in either layout, the share that it has in both."""
    both = np.maximum(np.minimum(one[1], other[1]) - np.maximum(one[0], other[0]), 0).sum()
    return float(both / ((one[1] - one[0]).sum() + (other[1] - other[0]).sum() - both))


def children(
    evaluator: Evaluator, members: Sequence[Found], number: int, keep_sizes: bool, rng: Random
) -> list[Candidate]:
    """Children of pairs of members, at their estimated prices. Chance draws two members, and the better one becomes a parent."""
    nodes = len(evaluator.problem.flops)
    parents = [Parent.of(one.groups, one.cuts, nodes) for one in members]

    def draw() -> int:
        return min(rng.randrange(len(parents)), rng.randrange(len(parents)))

    made = []
    for _ in range(number):
        mother, father = draw(), draw()
        while father == mother and len(parents) > 1:
            father = draw()
        made.append(crossed(evaluator, parents[mother], parents[father], keep_sizes, rng))
    return made
