"""State transfer over an emulated wide-area network, where uplinks are the limit: one donor beside the bare link, two beside one.

``python -m tests.bench.state [--json]``
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from subprocess import PIPE, Popen
from typing import Any

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.bench.rows import Row, show
from tests.bench.state_end import STATE_BYTES
from tests.wan.wan import Wan, WanUnavailable

LATENCY_SECONDS, RATE = 0.02, 5e6
"""One-way latency, and bytes per second of each node's uplink."""
TURNS = 3


def measure() -> list[Row]:
    """Measures the transfer of state. Raises WanUnavailable."""
    apart = 1 - np.eye(3)
    nodes = tuple(Node(name, 1, 1) for name in ("donor0", "donor1", "joiner"))
    network = Cluster(nodes, apart * LATENCY_SECONDS, np.where(apart > 0, RATE, 0.0))
    with Wan(network) as wan, ExitStack() as cleanup:

        def start(name: str, *arguments: str) -> Popen[str]:
            command = [sys.executable, "-m", "tests.bench.state_end", *arguments]
            process: Popen[Any] = wan.run(name, command, stdin=PIPE, stdout=PIPE, text=True)
            cleanup.callback(process.communicate)
            cleanup.callback(process.kill)
            return process

        donors = []
        for number, name in enumerate(("donor0", "donor1")):
            process = start(name, "donor", wan.address(name), str(number))
            assert process.stdout is not None
            donors.append(f"{wan.address(name)}:{process.stdout.readline().strip()}")
        joiner = start("joiner", "fetch")

        def seconds(*asked: str) -> float:
            assert joiner.stdin is not None
            assert joiner.stdout is not None
            print(*asked, file=joiner.stdin, flush=True)
            return float(joiner.stdout.readline())

        seconds(*donors)
        one, two = zip(*[(seconds(donors[0]), seconds(*donors)) for _ in range(TURNS)], strict=True)
    link = STATE_BYTES / RATE
    return [
        Row("state over the bare link", link, "s"),
        Row(
            "state from one donor",
            statistics.median(one),
            "s",
            "state over the bare link",
            statistics.median(one) / link,
        ),
        Row(
            "state from two donors",
            statistics.median(two),
            "s",
            "state from one donor",
            statistics.median(b / a for a, b in zip(one, two, strict=True)),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    try:
        found = measure()
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    show(f"{STATE_BYTES >> 20} MiB of state, uplinks of {RATE * 8e-6:.0f} Mbit/s", found, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
