"""Partitions of the nodes that are worth looking at: by bandwidth, from all nodes together to each by itself, and by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.population import Member

Partition = tuple[tuple[int, ...], ...]
"""The numbers of the nodes of each island, ascending."""

NOISE = 1.25
"""Links that are as fast as each other may be measured to differ by this factor."""

MOST_THRESHOLDS = 8
"""The number of bandwidths that are looked at."""


def partitions(cluster: Cluster, can_train: Callable[[tuple[int, ...]], bool]) -> Iterator[Partition]:
    """Different partitions into islands that can hold the model alone, as ``can_train`` says; the one of all nodes comes first.

    For each of several bandwidths, nodes belong together that reach each other over links as fast as that, in both directions. A
    part that cannot hold the model joins the one to which it has the fastest links, the smallest part first. In the same way
    these parts join until there are half as many, a quarter, and so on.
    """
    count = len(cluster.nodes)
    both = np.minimum(cluster.bandwidth, cluster.bandwidth.T)
    speeds = np.unique(both[~np.eye(count, dtype=bool)])
    picked = np.quantile(speeds, np.linspace(0, 1, MOST_THRESHOLDS), method="nearest") if len(speeds) else speeds
    found: dict[Partition, None] = {(tuple(range(count)),): None}
    yield from found
    for least in (*np.unique(picked), np.inf):
        _, label = connected_components(both >= least, directed=False)
        parts = [tuple(np.flatnonzero(label == part).tolist()) for part in range(label.max() + 1)]
        if (partition := _joined(parts, both, can_train, count)) not in found:
            found[partition] = None
            yield partition
    for partition in list(found):
        most = len(partition)
        while (most := most // 2) > 1:
            if (fewer := _joined(partition, both, can_train, most)) not in found:
                found[fewer] = None
                yield fewer


def with_newcomers(member: Member, cluster: Cluster) -> Partition:
    """The member's islands without the nodes that have left. Each other node of the cluster joins the island to which it has the
    fastest link."""
    number = {name: index for index, name in enumerate(cluster.ids)}
    nodes = [[number[node] for stage in island.stages for node in stage if node in number] for island in member.islands]
    parts = [part for part in nodes if part]
    here = {node for part in parts for node in part}
    both = np.minimum(cluster.bandwidth, cluster.bandwidth.T)
    others = [node for node in number.values() if node not in here] if parts else []
    joining = [(node, max(parts, key=lambda part: both[node, part].max())) for node in others]
    for node, part in joining:
        part.append(node)
    return tuple(sorted(tuple(sorted(part)) for part in parts))


def _joined(
    parts: Iterable[tuple[int, ...]],
    bandwidth: NDArray[np.float64],
    can_train: Callable[[tuple[int, ...]], bool],
    most: int,
) -> Partition:
    """The ``parts``, joined until each can train and at most ``most`` are left."""
    left = sorted(parts, key=lambda part: (len(part), part))
    able: list[tuple[int, ...]] = []
    while left:
        part = left.pop(0)
        others = (*left, *able)
        if not others or (can_train(part) and len(others) < most):
            able.append(part)
            continue
        speeds = {other: bandwidth[np.ix_(part, other)].max() for other in others}
        least = max(speeds.values()) / NOISE
        near = min((other for other in others if speeds[other] >= least), key=lambda other: (len(other), other))
        (left if near in left else able).remove(near)
        left = sorted([*left, tuple(sorted((*part, *near)))], key=lambda each: (len(each), each))
    return tuple(sorted(able))
