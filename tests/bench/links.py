"""The accuracy and duration of a new node's link measurements: ``python -m tests.bench.links [--json]``.

One node joins seven others over emulated links (tests/wan), from near and slow to far and fast. Each row is the bandwidth that
it reports for one link, the median of several turns, beside the link's rate, of which a TCP connection gets 96 %. The bandwidth
that it reports for all links together, at least that of the fastest, is compared with the sum of the rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from subprocess import PIPE, Popen
from typing import Any

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.bench.links_end import JOINER
from tests.bench.rows import Row, show
from tests.wan.wan import Wan, WanUnavailable

TURNS = 3
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Both directions of a link: one-way latency in seconds, and bytes per second."""

    latency: float
    rate: float

    @property
    def name(self) -> str:
        return f"{self.latency * 1e3:.0f} ms, {self.rate * 8e-6:.0f} Mbit/s"


KINDS = tuple(
    Kind(milliseconds / 1e3, megabits * 1e6 / 8)
    for milliseconds, megabits in ((1, 1000), (10, 100), (30, 500), (67, 790), (100, 2), (100, 100), (150, 300))
)


def measure() -> list[Row]:
    """Raises WanUnavailable."""
    names = [f"peer{number}" for number in range(len(KINDS))]
    size = len(names) + 1
    latency, rate = np.zeros((size, size)), np.zeros((size, size))
    for number, kind in enumerate(KINDS):
        latency[0, number + 1] = latency[number + 1, 0] = kind.latency
        rate[0, number + 1] = rate[number + 1, 0] = kind.rate
    network = Cluster(tuple(Node(name, 1, 1) for name in (JOINER, *names)), latency, rate)
    seconds: list[float] = []
    found: dict[tuple[str, str], list[float]] = {}
    together: dict[str, list[float]] = {"up": [], "down": []}
    with Wan(network) as wan, ExitStack() as cleanup:

        def start(name: str, *arguments: str) -> Popen[str]:
            command = [sys.executable, "-m", "tests.bench.links_end", *arguments]
            process: Popen[Any] = wan.run(name, command, stdin=PIPE, stdout=PIPE, text=True)
            cleanup.callback(process.communicate)
            cleanup.callback(process.kill)
            return process

        ends = {name: start(name, "peer", wan.address(name), name) for name in names}
        peers = []
        for name, process in ends.items():
            assert process.stdout is not None
            peers.append(f"{name}={wan.address(name)}:{process.stdout.readline().strip()}")
        for turn in range(TURNS):
            print(f"turn {turn + 1} of {TURNS} ...", file=sys.stderr, flush=True)
            output, _ = start(JOINER, "measure", *peers).communicate(timeout=PATIENCE_SECONDS)
            report = json.loads(output)
            seconds.append(report["seconds"])
            for way, speed in report["together"].items():
                together[way].append(speed)
            for source, destination, _, bandwidth in report["links"]:
                found.setdefault((source, destination), []).append(bandwidth)
    rows = []
    for name, kind in zip(names, KINDS, strict=True):
        for way, link in (("up", (JOINER, name)), ("down", (name, JOINER))):
            median = statistics.median(found[link])
            spread = ", ".join(f"{speed / kind.rate:.2f}" for speed in found[link])
            rows.append(Row(f"{kind.name}, {way} ({spread})", median * 8e-6, "Mbit/s", "its rate", median / kind.rate))
    rates = sum(kind.rate for kind in KINDS)
    for way, speeds in together.items():
        median = statistics.median(speeds)
        rows.append(Row(f"all links together, {way}", median * 8e-6, "Mbit/s", "their rates", median / rates))
    return [*rows, Row("duration of a turn", statistics.median(seconds), "s")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    try:
        found = measure()
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    show(f"Links as measured by a node that joins, {TURNS} turns", found, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
