"""The clusters and workloads for which the scheduler's benchmark plans."""

from __future__ import annotations

from random import Random

import numpy as np

from dtfm.scheduler.assemble.compact import CompactCluster
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Groups
from dtfm.scheduler.model.workload import Layer, Workload


def shuffled(cluster: Cluster, seed: int) -> Cluster:
    return part_of(cluster, np.random.default_rng(seed).permutation(len(cluster.nodes)).tolist())


def part_of(cluster: Cluster, nodes: list[int]) -> Cluster:
    index = np.ix_(nodes, nodes)
    return Cluster(tuple(cluster.nodes[node] for node in nodes), cluster.latency[index], cluster.bandwidth[index])


def random_cluster(seed: int, count: int) -> Cluster:
    """Speeds within a factor of 10, directed links within one of 100."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{i}", 10 ** rng.uniform(12, 13), 10 ** rng.uniform(9.5, 10.5)) for i in range(count))
    return Cluster(nodes, rng.uniform(0.001, 0.1, (count, count)), 10 ** rng.uniform(6.5, 8.5, (count, count)))


def regional_cluster(count: int, seed: int = 0) -> Cluster:
    """12 regions with fast links inside; speeds within a factor of 10."""
    rng = np.random.default_rng(seed)
    region = rng.integers(0, 12, count)
    between = 10 ** rng.uniform(7, 8.3, (12, 12))
    np.fill_diagonal(between, 1e9)
    near = region[:, None] == region[None]
    nodes = tuple(Node(f"n{i}", 10 ** rng.uniform(12.5, 13.5), 16e9, str(region[i])) for i in range(count))
    noise = rng.uniform(0.8, 1.2, (2, count, count))
    return Cluster(nodes, np.where(near, 0.001, 0.05) * noise[0], between[np.ix_(region, region)] * noise[1])


def compact_cluster(count: int) -> CompactCluster:
    """12 classes with fast links inside; speeds within a factor of 10, connections of 0.1 to 1 Gbit/s."""
    rng = np.random.default_rng(0)
    latency, bandwidth = rng.uniform(0.02, 0.12, (12, 12)), 10 ** rng.uniform(7, 8.3, (12, 12))
    np.fill_diagonal(latency, 0.001)
    np.fill_diagonal(bandwidth, 6e8)
    speeds, ups = 10 ** rng.uniform(12.5, 13.5, count), rng.choice([12.5e6, 62.5e6, 125e6], count)
    nodes = tuple(Node(f"n{i}", float(speeds[i]), 16e9, up=float(ups[i]), down=125e6) for i in range(count))
    return CompactCluster(nodes, tuple(f"c{i}" for i in range(12)), rng.integers(0, 12, count), latency, bandwidth)


def random_workload(seed: int, layers: int, micro_batches: int) -> Workload:
    rng = Random(seed)
    sizes = [(rng.choice([2e6, 2e7, 5e7]), rng.choice([1e5, 1e6, 4e6])) for _ in range(layers)]
    return Workload(tuple(Layer(f"l{i}", 2e11, p, a) for i, (p, a) in enumerate(sizes)), micro_batches)


def random_groups(rng: Random, nodes: int) -> Groups:
    stages = rng.randint(1, min(nodes, 8))
    order = rng.sample(range(nodes), rng.randint(stages, nodes))
    groups: list[list[int]] = [[] for _ in range(stages)]
    for index, node in enumerate(order):
        groups[index if index < stages else rng.randrange(stages)].append(node)
    return tuple(tuple(sorted(group)) for group in groups)
