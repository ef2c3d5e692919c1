"""Small clusters for the paper's objective, and its cost model word by word."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
from hypothesis import strategies as st

from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Groups
from dtfm.scheduler.model.workload import PaperCosts, Workload
from tests.scheduler.clusters import even_workload

SHAPES = st.sampled_from([(2, 2), (3, 2), (2, 3), (4, 1), (1, 4), (5, 1)])
"""Stages, and replicas of each."""


def literal_seconds(cluster: Cluster, costs: PaperCosts, groups: Groups) -> tuple[float, float]:
    """Sections 3.2 and 3.3 word by word, with both directions of every exchange: data-parallel and pipeline seconds."""
    latency, bandwidth = cluster.latency, cluster.bandwidth

    def exchange(a: int, b: int, size: float) -> float:
        return float(latency[a, b] + latency[b, a] + size / bandwidth[a, b] + size / bandwidth[b, a])

    gradient = costs.gradient_gigabytes * 1e9 / costs.replicas
    data_parallel = max(max(sum(exchange(a, b, gradient) for b in group if b != a) for a in group) for group in groups)
    activation = costs.activation_gigabytes * 1e9
    pipeline = sum(
        min(max(exchange(a, b, activation) for a, b in zip(one, order, strict=True)) for order in permutations(other))
        for one, other in pairwise(groups)
    )
    return data_parallel, pipeline


def all_equal_groups(nodes: tuple[int, ...], size: int) -> list[Groups]:
    """Every way to split the nodes into groups of one size, the order of the groups aside."""
    if not nodes:
        return [()]
    first, rest = nodes[0], nodes[1:]
    choices = {tuple(sorted(choice[: size - 1])) for choice in permutations(rest, size - 1)}
    return [
        ((first, *others), *groups)
        for others in choices
        for groups in all_equal_groups(tuple(node for node in rest if node not in others), size)
    ]


def lumpy_cluster(seed: int, count: int, regions: int) -> Cluster:
    """Directed links; regions whose nodes are interchangeable (regions = count: none are)."""
    rng = np.random.default_rng(seed)
    of = rng.integers(0, regions, count) if regions < count else np.arange(count)
    latency = rng.choice([0.001, 0.02, 0.1], (regions, regions))
    bandwidth = rng.choice([1e7, 5e7, 1e8, 1e9], (regions, regions))
    nodes = tuple(Node(f"n{index}", 1e12, 1e10) for index in range(count))
    return Cluster(nodes, latency[np.ix_(of, of)], bandwidth[np.ix_(of, of)])


def paper_job(stages: int, replicas: int, gradient: float = 0.1) -> Workload:
    return replace(even_workload(), paper=PaperCosts(stages, replicas, gradient, activation_gigabytes=0.2))
