"""Clusters and workloads for the scheduler's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.problem import Ints, Problem
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.yardstick_keeping import with_ways


def uniform_cluster(count: int, flops: float = 1e10, memory: float = 8e9, bandwidth: float = 1e8) -> Cluster:
    nodes = tuple(Node(f"n{index}", flops, memory) for index in range(count))
    return Cluster(nodes, np.full((count, count), 1e-3), np.full((count, count), bandwidth))


def random_cluster(seed: int, count: int, unreachable: float = 0.0) -> Cluster:
    """Speeds within a factor of 10, bandwidths of directed links within a factor of 100; some links may not exist."""
    rng = np.random.default_rng(seed)
    nodes = tuple(
        Node(f"n{index}", 10 ** rng.uniform(12, 13), 10 ** rng.uniform(9.5, 10.5), f"r{index % 3}")
        for index in range(count)
    )
    bandwidth = 10 ** rng.uniform(6.5, 8.5, (count, count)) * (rng.random((count, count)) >= unreachable)
    return Cluster(nodes, rng.uniform(0.001, 0.1, (count, count)), bandwidth)


def even_workload(layers: int = 12, micro_batches: int = 8, activation: float = 1e6) -> Workload:
    return Workload(tuple(Layer(f"layer{index}", 2e11, 2e7, activation) for index in range(layers)), micro_batches)


def shuffled(cluster: Cluster, seed: int) -> Cluster:
    """The same nodes in another order: region order is a good plan on many networks."""
    order = np.random.default_rng(seed).permutation(len(cluster.nodes))
    nodes = tuple(cluster.nodes[index] for index in order)
    return Cluster(nodes, cluster.latency[np.ix_(order, order)], cluster.bandwidth[np.ix_(order, order)])


def relayed(rng: np.random.Generator, count: int) -> tuple[tuple[Line, ...], Ints]:
    """Two relays, and who relays which link of ``count`` nodes: about half of the links, over relays or other nodes."""
    relays = tuple(Line(f"r{i}", 10 ** rng.uniform(6, 9), 10 ** rng.uniform(6, 9)) for i in range(2))
    via = rng.integers(0, count + 2, (count, count))
    direct = (via == np.arange(count)) | (via == np.arange(count)[:, None]) | (rng.random((count, count)) < 0.5)
    return relays, np.where(direct | np.eye(count, dtype=bool), -1, via)


def any_problem(rng: np.random.Generator, count: int, layers: int) -> Problem:
    """A problem where any of devices, memory, links and connections may decide. Some links do not exist, and nodes may keep
    what they need in any way."""
    shape = (count, count)

    def connection() -> float | None:
        return float(10 ** rng.uniform(6, 9)) if rng.random() < 0.5 else None

    nodes = tuple(
        Node(f"n{i}", 10 ** rng.uniform(12, 13.5), 10 ** rng.uniform(8.8, 10), up=connection(), down=connection())
        for i in range(count)
    )
    bandwidth = 10 ** rng.uniform(6, 9, shape) * (rng.random(shape) > rng.choice([0.0, 0.0, 0.05]))
    bandwidth[np.diag_indices(count)] = 1e9
    sizes = [(10 ** rng.uniform(10, 12), 10 ** rng.uniform(5, 7.5), 10 ** rng.uniform(4, 6.5)) for _ in range(layers)]
    model = tuple(Layer(f"l{i}", *map(float, size)) for i, size in enumerate(sizes))
    latency = rng.choice([0.0, 1e-3, 0.1]) * rng.random(shape)
    relays, via = relayed(rng, count) if rng.random() < 0.2 else ((), None)
    lines = tuple(Line(f"m{i}", 10 ** rng.uniform(6, 9), 10 ** rng.uniform(6, 9)) for i in range(2))
    if rng.random() < 0.3:
        nodes = tuple(replace(node, line=str(rng.choice(["", "m0", "m1"]))) for node in nodes)
    cluster = Cluster(nodes, latency, bandwidth, (*relays, *lines), via)
    return with_ways(rng, Problem(cluster, Workload(model, int(rng.choice([1, 4, 20, 60])))))
