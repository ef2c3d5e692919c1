"""The planner's input: the cluster, as the nodes measured it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.config.run_file import RunFile
from dtfm.coordinator.log.ledger import Carried, Ledger
from dtfm.scheduler.model.cluster import Cluster, Node

DEFAULT_LATENCY_SECONDS = 0.02
DEFAULT_BANDWIDTH = 12.5e6
"""Bytes per second, as of a 100 Mbit/s connection. Both defaults apply while no link has been measured."""

BITS_PER_ELEMENT = {"auto": 8.0625, "raw16": 16.0, "i8b256": 8.0625, "i4b64": 4.25, "i4h64": 4.25, "topk": 0.5625}
"""By codec (kernels/layout.py). Where "auto" takes a gentler codec than this one, its transfer hides under compute."""


def bytes_ratio(run: RunFile) -> float:
    """Bytes on a link per byte of a tensor, under the least compressing codec of the run."""
    width = 64.0 if run.train.precision == "fp64" else 32.0
    network = run.network
    return max(
        BITS_PER_ELEMENT.get(codec, width) / width
        for codec in (network.activations, network.gradients, network.reduction)
    )


def measured_cluster(ledger: Ledger, nodes: Sequence[str], ratio: float) -> Cluster:
    """The nodes in the order given, with their links as measured. A link that was not measured gets the median of the others.
    ``ratio``: see `bytes_ratio`."""
    size = len(nodes)
    latency, bandwidth = np.full((size, size), np.nan), np.full((size, size), np.nan)
    places = {node: place for place, node in enumerate(nodes)}
    for source, i in places.items():
        for destination, link in ledger.links.get(source, {}).items():
            if (j := places.get(destination)) is not None:
                latency[i, j], bandwidth[i, j] = link.latency_seconds, link.bandwidth
    reached = np.nan_to_num(bandwidth) > 0
    _fill(latency, latency[reached], DEFAULT_LATENCY_SECONDS)
    _fill(bandwidth, bandwidth[reached], DEFAULT_BANDWIDTH)
    members = [ledger.members[node] for node in nodes]
    ups = _connections([member.up for member in members], bandwidth.max(axis=1))
    downs = _connections([member.down for member in members], bandwidth.max(axis=0))
    return Cluster(
        tuple(
            Node(name, member.device.flops, member.device.memory_bytes, up=up, down=down)
            for name, member, up, down in zip(nodes, members, ups, downs, strict=True)
        ),
        latency,
        bandwidth,
        np.full((size, size), ratio),
    )


def _connections(measured: Sequence[Carried | None], fastest: NDArray[np.float64]) -> list[float | None]:
    """Bytes per second that each node's connection carries; ``fastest`` are the nodes' fastest links.

    The first nodes had few peers to measure their connection with. Theirs counts as the median multiple of the fastest link, as
    measured by the others, if that is more; None: nobody has measured. A connection carries at least its fastest link.
    """
    both = list(zip(measured, fastest.tolist(), strict=True))
    known = [carried.bandwidth / link for carried, link in both if carried and not carried.least and link]
    known = known or [carried.bandwidth / link for carried, link in both if carried and link]
    if not known:
        return [None] * len(measured)
    usual = float(np.median(known))
    result = []
    for carried, link in both:
        at_least = max(link, carried.bandwidth if carried else 0.0)
        result.append((max(at_least, usual * link) if carried is None or carried.least else at_least) or None)
    return result


def _fill(matrix: NDArray[np.float64], known: NDArray[np.float64], default: float) -> None:
    matrix[np.isnan(matrix)] = float(np.median(known)) if known.size else default
    np.fill_diagonal(matrix, 0.0)
