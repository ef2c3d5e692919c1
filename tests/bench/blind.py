"""The coordinator's command with a scheduler that sees no links: ``python -m tests.bench.blind SEED serve ...``.

What placing nodes at random costs is measured with it: all devices and links look alike to it, in an order drawn by SEED.
"""

from __future__ import annotations

import sys
from random import Random

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.cluster.alike import run_with


def shuffled(cluster: Cluster, seed: int) -> Cluster:
    """The nodes in another order, each as the median one, and every link as the median one."""
    order = Random(seed).sample(range(len(cluster.nodes)), len(cluster.nodes))
    flops = float(np.median([node.flops for node in cluster.nodes]))
    memory = min(node.memory_bytes for node in cluster.nodes)
    others = ~np.eye(len(order), dtype=bool)
    return Cluster(
        tuple(Node(cluster.nodes[index].id, flops, memory) for index in order),
        np.full(others.shape, np.median(cluster.latency[others])),
        np.full(others.shape, np.median(cluster.bandwidth[others])),
    )


if __name__ == "__main__":
    seed = int(sys.argv.pop(1))
    run_with(lambda cluster: shuffled(cluster, seed))
