"""A coordinator and nodes as real processes, each with its own place in an emulated network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.faults import Fault
from tests.cluster.launch import Cluster
from tests.wan.wan import COORDINATOR, Wan

PORT = 7400
COMMAND = "dtfm.coordinator.cli"
NODE_COMMAND = "dtfm.node.cli"
SLOW_NODE_COMMAND = "tests.wan.slow_device"


def wan_cluster(
    wan: Wan,
    folder: Path,
    run: str,
    *,
    coordinator: Sequence[str] = (COMMAND,),
    flops: Mapping[str, float] | None = None,
    invited: bool = False,
    faults: Sequence[Fault] | None = None,
) -> Cluster:
    """``with wan_cluster(wan, folder, run) as cluster: cluster.add("n0")``: each process runs in the namespace of its name.

    ``coordinator``: a module to run in place of the coordinator's own, and its first arguments. ``flops``: by node, the FLOP/s of
    its device, where that is to be slower than this machine (slow_device.py). ``invited``: each node has a key of its own.
    ``faults`` as for Cluster.
    """

    def place(name: str, command: list[str]) -> list[str]:
        instead = {COMMAND: coordinator}
        if flops is not None and name in flops:
            instead[NODE_COMMAND] = (SLOW_NODE_COMMAND, str(flops[name]))
        return wan.inside(name, [part for word in command for part in instead.get(word, (word,))])

    address = f"{wan.address(COORDINATOR)}:{PORT}"
    return Cluster(folder, run, address=address, place=place, alike=False, invited=invited, faults=faults)
