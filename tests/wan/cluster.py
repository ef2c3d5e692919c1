"""A coordinator and nodes as real processes, each with its own place in an emulated network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.cluster.launch import Cluster
from tests.wan.wan import COORDINATOR, Wan

PORT = 7400
COMMAND = "dtfm.coordinator.cli"


def wan_cluster(wan: Wan, folder: Path, run: str, *, coordinator: Sequence[str] = (COMMAND,)) -> Cluster:
    """``with wan_cluster(wan, folder, run) as cluster: cluster.add("n0")``: each process runs in the namespace of its name.

    ``coordinator``: a module to run in place of the coordinator's own, and its first arguments.
    """

    def place(name: str, command: list[str]) -> list[str]:
        if name == COORDINATOR:
            command = [part for word in command for part in (coordinator if word == COMMAND else (word,))]
        return wan.inside(name, command)

    return Cluster(folder, run, address=f"{wan.address(COORDINATOR)}:{PORT}", place=place, alike=False)
