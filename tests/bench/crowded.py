"""The coordinator's command for nodes that stand for machines of their own, but share this one's cores:
``python -m tests.bench.crowded serve ...``.

Each node timed itself while others did not compute. Here all count for as fast as the fastest was, times its share of a core.
"""

from __future__ import annotations

import os
from dataclasses import replace

from dtfm.scheduler.cluster import Cluster
from tests.cluster.alike import run_with

CORES = len(os.sched_getaffinity(0))


def crowded(cluster: Cluster) -> Cluster:
    """The same links between nodes that are as fast as they are when all compute at once."""
    flops = max(node.flops for node in cluster.nodes) * min(1.0, CORES / len(cluster.nodes))
    return replace(cluster, nodes=tuple(replace(node, flops=flops) for node in cluster.nodes))


if __name__ == "__main__":
    run_with(crowded)
