"""The cluster as the scheduler takes it, from what the nodes measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.ledger import Ledger
from dtfm.scheduler.cluster import Cluster, Node

DEFAULT_LATENCY_SECONDS = 0.02
DEFAULT_BANDWIDTH = 12.5e6
"""Bytes per second, as of a 100 Mbit/s connection: what a link counts as while none at all has been measured."""


def measured_cluster(ledger: Ledger, nodes: Sequence[str]) -> Cluster:
    """The nodes in the order given, with their links as measured; one that was not gets the median of those that were."""
    size = len(nodes)
    latency, bandwidth = np.full((size, size), np.nan), np.full((size, size), np.nan)
    for i, source in enumerate(nodes):
        row = ledger.links.get(source, {})
        for j, destination in enumerate(nodes):
            if (link := row.get(destination)) is not None:
                latency[i, j], bandwidth[i, j] = link.latency_seconds, link.bandwidth
    reached = np.nan_to_num(bandwidth) > 0
    _fill(latency, latency[reached], DEFAULT_LATENCY_SECONDS)
    _fill(bandwidth, bandwidth[reached], DEFAULT_BANDWIDTH)
    members = [ledger.members[node].device for node in nodes]
    return Cluster(
        tuple(Node(name, device.flops, device.memory_bytes) for name, device in zip(nodes, members, strict=True)),
        latency,
        bandwidth,
    )


def _fill(matrix: NDArray[np.float64], known: NDArray[np.float64], default: float) -> None:
    matrix[np.isnan(matrix)] = float(np.median(known)) if known.size else default
    np.fill_diagonal(matrix, 0.0)
