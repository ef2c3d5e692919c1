"""Where the search starts: plans made from clusters of well connected nodes, and from the given order of nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from dtfm.scheduler.model.problem import Groups, Ints, Problem
from dtfm.scheduler.model.request import Shape

SPARSE = 16
"""The number of different stage counts that get seeds first. Seeds for all other counts follow."""

Start = tuple[Groups, tuple[int, ...] | None]
"""Groups and the cuts to begin with; None lets best_cuts find them."""


def similarity_order(problem: Problem) -> tuple[int, ...]:
    """All nodes, well connected ones side by side (average linkage over the time to exchange a typical message)."""
    count = len(problem.flops)
    if count < 3:
        return tuple(range(count))
    distance = problem.exchange(float(problem.activation.max()) + float(problem.reduced_before[-1]) / count)
    distance = np.minimum(2 * distance, 1e12)
    np.fill_diagonal(distance, 0.0)
    return tuple(int(node) for node in leaves_list(linkage(squareform(distance, checks=False), "average")))


def nearest_nodes(problem: Problem) -> Ints:
    """By node, all others by the time to exchange a typical activation, there and back: int64 [nodes, nodes - 1]."""
    distance = problem.exchange(float(problem.activation.max()))
    np.fill_diagonal(distance, -1.0)
    return np.ascontiguousarray(np.argsort(distance, axis=1, kind="stable")[:, 1:])


def seed_groups(problem: Problem, shape: Shape, near: int = 0) -> Iterator[Groups]:
    """Groups with well connected nodes as replicas of one stage, or along one route, or in the given order.

    There are some for every number of stages: a cluster may suit one number only, for example 8 where every region has 8 nodes.
    A few numbers, far apart, come first, then the others. In both parts, numbers close to ``near`` come first.
    """
    count = len(problem.flops)
    orders = [similarity_order(problem), tuple(range(count))]
    by_speed = tuple(sorted(range(count), key=lambda node: (-problem.flops[node], node)))
    if shape.sizes is not None:
        for order in (*orders, by_speed):
            yield _blocks(order, shape.sizes)
            yield dealt(order, shape.sizes)
        return
    numbers = [shape.stages] if shape.stages is not None else list(range(1, min(shape.most_stages, count) + 1))
    early = {*numbers}
    if len(numbers) > SPARSE:
        early = {*np.geomspace(1, numbers[-1], SPARSE).astype(int).tolist(), min(max(1, near), numbers[-1])}
    numbers.sort(key=lambda stages: (stages not in early, abs(stages - near), stages))
    able = _able(problem)
    if len(able) < count:
        orders += [tuple(node for node in order if node in able) for order in orders]
    for stages in numbers:
        for order in orders:
            if stages <= len(order):
                yield _blocks(order, _even(len(order), stages))
                yield dealt(order, _even(len(order), stages))
        for used in {stages, 2 * stages, (count + stages) // 2}:
            if stages <= used < count:
                fast = set(by_speed[:used])
                yield _blocks([node for node in orders[0] if node in fast], _even(used, stages))
    if shape.admits(((0,),)):
        for node in by_speed[:16]:
            yield ((node,),)


def _able(problem: Problem) -> set[int]:
    """Nodes that are not much slower, and not much worse connected, than most."""
    connection = np.minimum(problem.up, problem.down)
    able = (problem.flops > 0.2 * np.median(problem.flops)) & (connection >= 0.2 * np.median(connection))
    return set(np.flatnonzero(able).tolist())


def random_groups(count: int, shape: Shape, rng: Random) -> Groups:
    """Random groups within the shape. If the number of nodes is free, at least half of them take part."""
    order = list(range(count))
    rng.shuffle(order)
    if shape.sizes is not None:
        return _blocks(order, shape.sizes)
    stages = shape.stages if shape.stages is not None else rng.randint(1, min(shape.most_stages, count))
    return _blocks(order, _even(rng.randint(max(stages, count // 2), count), stages))


def _even(count: int, stages: int) -> tuple[int, ...]:
    return tuple(count // stages + (stage < count % stages) for stage in range(stages))


def _blocks(order: tuple[int, ...] | list[int], sizes: tuple[int, ...]) -> Groups:
    edges = np.cumsum((0, *sizes)).tolist()
    return tuple(tuple(sorted(order[a:b])) for a, b in itertools.pairwise(edges))


def dealt(order: tuple[int, ...] | list[int], sizes: tuple[int, ...]) -> Groups:
    """Deals the nodes out to the stages in turn, so that neighbours in the order are in different stages."""
    groups: list[list[int]] = [[] for _ in sizes]
    stage = 0
    for node in order[: sum(sizes)]:
        while len(groups[stage % len(sizes)]) == sizes[stage % len(sizes)]:
            stage += 1
        groups[stage % len(sizes)].append(node)
        stage += 1
    return tuple(tuple(sorted(group)) for group in groups)
