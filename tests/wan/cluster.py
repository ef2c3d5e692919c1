"""A coordinator and nodes as real processes, each behind its own connection."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.launch import Cluster
from tests.wan.wan import COORDINATOR, Wan

PORT = 7400


def wan_cluster(wan: Wan, folder: Path, run: str) -> Cluster:
    """``with wan_cluster(wan, folder, run) as cluster: cluster.add("n0")``: nodes run where ``wan`` has one of that name."""
    return Cluster(folder, run, address=f"{wan.address(COORDINATOR)}:{PORT}", place=wan.inside)
