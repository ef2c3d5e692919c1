"""The coordinator's command with a scheduler that cannot tell links apart: ``python -m tests.bench.blind SEED serve ...``.

It measures the cost of random placement: the scheduler sees equal devices and equal links, in an order that SEED decides.
"""

from __future__ import annotations

import sys
from random import Random

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.cluster.alike import run_with


def shuffled(cluster: Cluster, seed: int) -> Cluster:
    """The nodes in another order. Every node has the median speed, every link the median latency and bandwidth."""
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
