"""The coordinator's command for nodes that stand for separate machines but share this one's cores:
``python -m tests.bench.crowded SHARE serve ...``.

Each node timed its device while the others did not compute. The scheduler sees all nodes with the speed of the fastest one, times
SHARE (`share_of_a_core`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

from dtfm.scheduler.model.cluster import Cluster
from tests.cluster.alike import run_with
from tests.cluster.launch import ROOT

TIMED_SECONDS = 5.0


def share_of_a_core(nodes: int) -> float:
    """The speed of each of ``nodes`` processes that compute at the same time, over the speed of one alone, as measured. It is
    below the process's share of the cores, as caches are shared, too."""
    alone, together = _passes(1), _passes(nodes)
    return min(1.0, statistics.mean(together) / alone[0])


def _passes(processes: int) -> list[int]:
    """The passes that each of ``processes`` makes in TIMED_SECONDS when all run at the same time."""
    command = [sys.executable, "-m", "tests.bench.crowded", "compute"]
    pipe = subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running: list[subprocess.Popen[str]] = []
    try:
        running.extend(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment)
            for _ in range(processes)
        )
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [int(process.communicate()[0]) for process in running]
    finally:
        for process in running:
            process.kill()


def _compute() -> None:
    """When told to begin, passes forward and backward through a small transformer layer; prints the number of passes."""
    import torch  # here, as a coordinator does not need it

    layer = torch.nn.TransformerEncoderLayer(96, 4, 288, dropout=0.0, batch_first=True)  # about the size of wan.py's
    x = torch.randn(1, 192, 96)
    layer(x).sum().backward()
    print("ready", flush=True)
    sys.stdin.readline()
    passes, until = 0, time.perf_counter() + TIMED_SECONDS
    while time.perf_counter() < until:
        layer(x).sum().backward()
        passes += 1
    print(passes)


def crowded(cluster: Cluster, share: float) -> Cluster:
    """The cluster with the speeds of its nodes when all compute at the same time."""
    flops = share * max(node.flops for node in cluster.nodes)
    return replace(cluster, nodes=tuple(replace(node, flops=flops) for node in cluster.nodes))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["compute"]:
            _compute()
        case [share, *_]:
            del sys.argv[1]
            run_with(lambda cluster: crowded(cluster, float(share)))
        case _:
            raise SystemExit(__doc__)
