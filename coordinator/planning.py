"""From what was measured to what the scheduler takes, and from its decision to ours."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtfm.coordinator.ledger import Ledger
from dtfm.coordinator.state import PlanChosen
from dtfm.scheduler.cluster import Cluster, Node
from dtfm.scheduler.decision import Infeasible
from dtfm.scheduler.plan import Plan
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.workload import Workload

DEFAULT_LATENCY_SECONDS = 0.02
DEFAULT_BANDWIDTH = 12.5e6
"""Bytes per second, as of a 100 Mbit/s connection: what a link counts as while none at all has been measured."""


def choose(
    cluster: Cluster,
    workload: Workload,
    incumbent: Plan | None,
    *,
    stages: int | tuple[int, ...] | None,
    seed: int,
    generation: int,
    seconds: float,
) -> PlanChosen | str:
    """A plan found within about so many seconds, or a sentence about why these nodes allow none. For a thread of its own.

    Raises ValueError where what the run asks for is impossible with any nodes.
    """
    until = time.monotonic() + seconds
    try:
        decision = schedule(
            cluster,
            workload,
            incumbent,
            stages=stages,
            seed=seed,
            deadline=lambda: time.monotonic() > until,
            generation=generation,
        )
    except Infeasible as error:
        return str(error)
    return PlanChosen(
        decision.plan,
        decision.sentence,
        _finite(decision.predicted.iteration_seconds),
        _finite(decision.lower_bound_seconds),
    )


def measured_cluster(ledger: Ledger, nodes: Sequence[str]) -> Cluster:
    """The nodes in the order given, with their links as measured; one that was not gets the median of those that were."""
    size = len(nodes)
    latency, bandwidth = np.full((size, size), np.nan), np.full((size, size), np.nan)
    index = {node: i for i, node in enumerate(nodes)}
    for (source, destination), link in ledger.links.items():
        if source in index and destination in index:
            at = index[source], index[destination]
            latency[at], bandwidth[at] = link.latency_seconds, link.bandwidth
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


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
