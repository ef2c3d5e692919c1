"""The paper's five networks at eight nodes, slowed down until a small machine can emulate them.

Latencies stay. All bandwidths are divided by one number, chosen so that all links together carry 1.5 Gbit/s when all are busy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dtfm.scheduler.formats.paper import Network, paper_network
from dtfm.scheduler.model.cluster import Cluster

TOTAL_BANDWIDTH = 1.5e9 / 8
"""Bytes per second, summed over all ordered pairs."""

_CHOSEN = {
    Network.DATA_CENTER: (0, 1, 8, 9, 16, 17, 24, 25),  # two GPUs on each of four instances
    Network.SPOT: (0, 1, 2, 3, 32, 33, 34, 35),  # half in an instance of four GPUs, half in instances of one
    Network.UNIVERSITIES: (0, 1, 2, 3, 32, 33, 34, 35),
    Network.REGIONAL: (0, 1, 16, 17, 32, 33, 48, 49),
    Network.WORLDWIDE: (0, 8, 16, 24, 32, 40, 48, 56),  # one node in each of the eight regions
}


@dataclass(frozen=True, slots=True)
class Scaled:
    """``cluster`` has the paper's bandwidths divided by ``divisor``; its nodes are n0 to n7."""

    cluster: Cluster
    divisor: float


def eight_nodes(network: Network, total_bandwidth: float = TOTAL_BANDWIDTH) -> Scaled:
    """Eight of the network's 64 nodes, in region order; ``total_bandwidth`` in bytes per second."""
    whole = paper_network(network)
    chosen = np.array(_CHOSEN[network])
    nodes = tuple(replace(whole.nodes[index], id=f"n{number}") for number, index in enumerate(chosen))
    latency, bandwidth = (matrix[np.ix_(chosen, chosen)].copy() for matrix in (whole.latency, whole.bandwidth))
    for matrix in (latency, bandwidth):
        np.fill_diagonal(matrix, 0.0)
    divisor = float(bandwidth.sum()) / total_bandwidth
    return Scaled(Cluster(nodes, latency, bandwidth / divisor), divisor)
