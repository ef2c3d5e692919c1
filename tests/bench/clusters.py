"""The clusters and workloads of the scheduler's benchmarks."""

from __future__ import annotations

from random import Random

import numpy as np

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


GPUS = (
    (82.6e12, 24e9),
    (35.6e12, 24e9),
    (29.8e12, 10e9),
    (14.0e12, 8e9),
    (67.0e12, 80e9),
    (156e12, 80e9),
    (10.1e12, 12e9),
    (4.0e12, 8e9),
)
"""FLOP/s and memory in bytes of devices that people own and rent, 40 times apart."""
GPU_SHARES = (0.2, 0.15, 0.15, 0.1, 0.08, 0.05, 0.15, 0.12)
"""The fraction of all nodes that have each of GPUS."""


def unequal_cluster(seed: int, count: int) -> Cluster:
    """Nodes in data centers and homes of six regions, with devices 40 times apart.

    Two thirds sit in data centers: two to four in each region, 1 to 10 Gbit/s inside, connections of 0.5 to 5 Gbit/s, and 0.1
    to 1 Gbit/s to elsewhere. One third are homes with 10 to 100 Mbit/s up and 50 to 500 Mbit/s down.
    """
    rng = np.random.default_rng([seed, count])
    where = rng.uniform(0, 1, (6, 2))
    region = rng.integers(0, 6, count)
    home = rng.random(count) < 1 / 3
    center = np.where(home, -1 - np.arange(count), region * 4 + rng.integers(0, rng.integers(2, 5, 6)[region]))
    far = np.linalg.norm(where[:, None] - where[None], axis=2)
    far = far[np.ix_(region, region)]
    together = center[:, None] == center[None]
    latency = np.where(together, 0.0005, 0.004 + 0.08 * far) + np.where(home, 0.008, 0.0)[:, None] / 2
    latency = latency * rng.uniform(0.9, 1.2, latency.shape)
    up = np.where(home, 10 ** rng.uniform(7, 8, count), 10 ** rng.uniform(8.7, 9.7, count)) / 8
    down = np.where(home, 10 ** rng.uniform(7.7, 8.7, count), up * 8) / 8
    inside = 10 ** rng.uniform(9, 10, count)[np.searchsorted(np.unique(center), center)] / 8
    between = 10 ** rng.uniform(8, 9, (count, count)) / (1 + 2 * far) / 8
    bandwidth = np.where(together, inside[:, None], between)
    bandwidth = np.minimum(bandwidth, np.minimum(up[:, None], down[None]))
    device = rng.choice(len(GPUS), size=count, p=GPU_SHARES)
    nodes = tuple(
        Node(
            f"n{i}",
            GPUS[device[i]][0] * rng.uniform(0.3, 0.5),
            GPUS[device[i]][1] * 0.9,
            f"r{region[i]}",
            float(up[i]),
            float(down[i]),
        )
        for i in range(count)
    )
    return Cluster(nodes, latency, bandwidth)


def transformer(layers: int, width: int, micro_batches: int, tokens: int = 2048) -> Workload:
    """A decoder of ``layers`` blocks between an embedding and a head, in bf16, micro-batches of ``tokens`` tokens."""
    block, ends = 12 * width**2, 32_000 * width
    body = [Layer(f"block{i}", 2.0 * tokens * block, 2.0 * block, 2.0 * tokens * width) for i in range(layers)]
    first = Layer("embedding", 0.0, 2.0 * ends, 2.0 * tokens * width)
    last = Layer("head", 2.0 * tokens * ends, 2.0 * ends, 4.0 * tokens)
    return Workload((first, *body, last), micro_batches, optimizer_bytes_per_parameter_byte=4.0)


def unequal(seed: int, count: int) -> tuple[Cluster, Workload]:
    """A cluster of ``count`` unequal nodes and a model that suits its size: 1B for 16 nodes, 7B for 128."""
    layers, width = {16: (22, 2048), 32: (26, 2560), 64: (32, 3200), 128: (32, 4096)}.get(count, (32, 4096))
    return unequal_cluster(seed, count), transformer(layers, width, micro_batches=16 * count)
