"""The coordinator's command for nodes that share this machine's cores: ``python -m tests.cluster.alike serve ...``.

When such nodes measure themselves and their links, they measure how busy the others are at that moment, and plans would follow
these figures. Here the scheduler sees all nodes as equally fast, and all links that work: as fast as the fastest one that was
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dtfm.coordinator import cli
from dtfm.coordinator.service.planning import planner
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision
from dtfm.scheduler.schedule import schedule


def alike(cluster: Cluster) -> Cluster:
    flops = max(node.flops for node in cluster.nodes)
    works = ~np.eye(len(cluster.nodes), dtype=bool) & (cluster.bandwidth > 0)
    if not works.any():
        return cluster
    return replace(
        cluster,
        nodes=tuple(replace(node, flops=flops, up=None, down=None) for node in cluster.nodes),
        latency=np.where(works, cluster.latency[works].min(), 0.0),
        bandwidth=np.where(works, cluster.bandwidth[works].max(), 0.0),
    )


def run_with(change: Callable[[Cluster], Cluster]) -> None:
    """Runs the command; the scheduler gets what ``change`` returns for the measured cluster."""

    def plan(cluster: Cluster, *arguments: Any, **options: Any) -> Decision:
        return schedule(change(cluster), *arguments, **options)

    vars(planner)["schedule"] = plan
    cli.main()


def main() -> None:
    run_with(alike)


if __name__ == "__main__":
    main()
