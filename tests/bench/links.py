"""The accuracy and duration of a new node's link measurements: ``python -m tests.bench.links [--json]``.

One node joins seven others over emulated links (tests/wan), from near and slow to far and fast. Each row is the bandwidth that
it reports for one link, the median of several turns, beside the link's rate. A TCP connection gets 96 % of the rate. The
bandwidth that it reports for all links together, at least the fastest link's, is compared with the sum of the rates.

With --home all links of the one node share its line, which carries less up than down.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Line:
    """The speed of a node's line, which all its links share, in bytes per second."""

    up: float
    down: float


KINDS = tuple(
    Kind(milliseconds / 1e3, megabits * 1e6 / 8)
    for milliseconds, megabits in ((1, 1000), (10, 100), (30, 500), (67, 790), (100, 2), (100, 100), (150, 300))
)


AROUND_HOME = tuple(Kind(milliseconds / 1e3, 3e6) for milliseconds in (16, 16, 16, 32, 32, 32, 24))
LINE = Line(up=1e6, down=5e6)


def measure(kinds: Sequence[Kind], line: Line | None, turns: int = TURNS) -> list[Row]:
    """Measures the links. Raises WanUnavailable."""
    names = [f"peer{number}" for number in range(len(kinds))]
    size = len(names) + 1
    latency, rate = np.zeros((size, size)), np.zeros((size, size))
    for number, kind in enumerate(kinds):
        latency[0, number + 1] = latency[number + 1, 0] = kind.latency
        rate[0, number + 1] = rate[number + 1, 0] = kind.rate
    up, down = (line.up, line.down) if line else (None, None)
    network = Cluster((Node(JOINER, 1, 1, up=up, down=down), *(Node(name, 1, 1) for name in names)), latency, rate)
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
        for turn in range(turns):
            print(f"turn {turn + 1} of {turns} ...", file=sys.stderr, flush=True)
            output, _ = start(JOINER, "measure", *peers).communicate(timeout=PATIENCE_SECONDS)
            report = json.loads(output)
            seconds.append(report["seconds"])
            for way, speed in report["together"].items():
                together[way].append(speed)
            for source, destination, _, bandwidth in report["links"]:
                found.setdefault((source, destination), []).append(bandwidth)
    rows = []
    for way, limit in (("up", up), ("down", down)):
        for name, kind in zip(names, kinds, strict=True):
            speeds, rated = found[(JOINER, name) if way == "up" else (name, JOINER)], min(kind.rate, limit or math.inf)
            median = statistics.median(speeds)
            spread = ", ".join(f"{speed / rated:.2f}" for speed in speeds)
            rows.append(Row(f"{kind.name}, {way} ({spread})", median * 8e-6, "Mbit/s", "its rate", median / rated))
        median, rated = statistics.median(together[way]), limit or sum(kind.rate for kind in kinds)
        rows.append(Row(f"all links together, {way}", median * 8e-6, "Mbit/s", "their rate", median / rated))
    return [*rows, Row("duration of a turn", statistics.median(seconds), "s")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", action="store_true", help="a node whose links share a line")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    try:
        found = measure(AROUND_HOME, LINE) if arguments.home else measure(KINDS, None)
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    show(f"Links as measured by a node that joins, {TURNS} turns", found, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
