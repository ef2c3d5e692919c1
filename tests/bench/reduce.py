"""Summing gradients across the world: ``python -m tests.bench.reduce [--json] [--turns N] [--hivemind PYTHON] [--trace FOLDER]``.

Four replicas, in every other region of the paper's worldwide network, sum 32 MiB of float32 in eight buckets. The network is
emulated (tests/wan), with the paper's latencies, and its bandwidths divided by one number. Ours under two codecs is compared
with torch.distributed's all-reduce over Gloo and with hivemind's averager. For hivemind, make a virtual environment with
``pip install hivemind==1.1.12 torch 'numpy<2.4'`` and name its interpreter; otherwise its row is left out.

A turn lasts from the order to all replicas until the last one has all sums. The first turn of each way opens connections and does
not count. The ways run one after the other; values are medians. One row is the least time that the busiest link needs for ours:
over each link go a quarter of the gradients as shares, and a quarter as sums.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

import numpy as np

from dtfm.scheduler.formats.paper import Network
from dtfm.scheduler.model.cluster import Cluster
from tests.bench.reduce_end import BUCKET_ELEMENTS, BUCKETS
from tests.bench.rows import Row, show
from tests.cluster.launch import ROOT
from tests.wan.check import check
from tests.wan.networks import eight_nodes
from tests.wan.wan import Wan, WanUnavailable

CODECS = ("off", "i8b256")
REPLICAS = (0, 2, 4, 6)
TOTAL_BANDWIDTH = 400e6 / 8
"""Bytes per second over all twelve links: few enough that links matter more than computing on two cores."""
PORT = 7500
BYTES = 4 * BUCKETS * BUCKET_ELEMENTS


def four_replicas() -> tuple[Cluster, float]:
    """The network, and the divisor of the paper's bandwidths."""
    eight = eight_nodes(Network.WORLDWIDE)
    index = np.ix_(REPLICAS, REPLICAS)
    nodes = tuple(eight.cluster.nodes[number] for number in REPLICAS)
    bandwidth = eight.cluster.bandwidth[index]
    slower = float(bandwidth.sum()) / TOTAL_BANDWIDTH
    return Cluster(nodes, eight.cluster.latency[index], bandwidth / slower), eight.divisor * slower


class Replicas:
    """The running replicas of one way."""

    def __init__(self, wan: Wan, folder: str, python: str, way: str, trace: str) -> None:
        addresses = [wan.address(name) for name in wan.network.ids]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if trace:
            environment["REDUCE_TRACE"] = trace
        command = [python, "-m", "tests.bench.reduce_end", way]
        options: dict[str, Any] = {"cwd": folder, "env": environment, "stdin": PIPE, "stdout": PIPE, "text": True}
        self._ends: list[Popen[str]] = []
        for rank, name in enumerate(wan.network.ids):
            arguments = [*command, str(rank), str(PORT), *addresses]
            self._ends.append(wan.run(name, arguments, stderr=DEVNULL, **options))
        self._all_say("ready")
        self._tell()
        self._all_say("connected")

    def turn(self) -> tuple[float, float]:
        """Returns the seconds until all replicas had the sums, and the largest relative error."""
        began = time.perf_counter()
        self._tell()
        for end in self._ends:
            self._line(end)
        seconds = time.perf_counter() - began
        error = max(float(self._line(end)) for end in self._ends)
        self._all_say("again")
        return seconds, error

    def close(self) -> None:
        """Lets the replicas end, so that traces are complete; then kills the running ones, and all their children."""
        for end in self._ends:
            assert end.stdin is not None
            end.stdin.close()
        for end in self._ends:
            with contextlib.suppress(TimeoutExpired):
                end.wait(5)
        for end in self._ends:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(end.pid, signal.SIGKILL)
            end.wait(10)
            assert end.stdout is not None
            end.stdout.close()

    def _tell(self) -> None:
        for end in self._ends:
            assert end.stdin is not None
            end.stdin.write("\n")
            end.stdin.flush()

    def _line(self, end: Popen[str]) -> str:
        assert end.stdout is not None
        line = end.stdout.readline()
        if not line:
            raise RuntimeError("a replica ended too early")
        return line.strip()

    def _all_say(self, word: str) -> None:
        for end in self._ends:
            said = self._line(end)
            if said != word:
                raise RuntimeError(f"a replica said {said!r} instead of {word!r}")


def measure(wan: Wan, python: str, way: str, turns: int, trace: str) -> tuple[float, float]:
    """Returns the median seconds and the largest error. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        replicas = Replicas(wan, folder, python, way, trace)
        try:
            taken = [replicas.turn() for _ in range(turns + 1)][1:]
        finally:
            replicas.close()
    print(f"{way}: {taken}", file=sys.stderr, flush=True)
    return statistics.median(seconds for seconds, _ in taken), max(error for _, error in taken)


def rows(seconds: dict[str, float], slowest_rate: float) -> list[Row]:
    others = {way: seconds[way] for way in ("gloo", "hivemind") if way in seconds}
    found = [Row(way, value, "s") for way, value in others.items()]
    best = min(others, key=lambda way: others[way])
    found += [
        Row(f"ours, {codec}", seconds[codec], "s", best, seconds[codec] / others[best])
        for codec in CODECS
        if codec in seconds
    ]
    least = 2 * BYTES / len(REPLICAS) / slowest_rate
    if "off" in seconds:
        found.append(Row("ours, off: busiest link at its rate", least, "s", "ours, off", least / seconds["off"]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each way, after one that warms up")
    parser.add_argument("--only", nargs="+", choices=(*CODECS, "gloo", "hivemind"), help="leave out the others")
    parser.add_argument("--hivemind", default="", metavar="PYTHON", help="an interpreter that can import hivemind")
    parser.add_argument("--trace", default="", metavar="FOLDER", help="write Chrome traces of ours")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    given = parser.parse_args(arguments)
    network, divisor = four_replicas()
    ways = [way for way in (*CODECS, "gloo", "hivemind") if given.only is None or way in given.only]
    if not given.hivemind and "hivemind" in ways:
        print("hivemind is left out, as there is no --hivemind PYTHON", file=sys.stderr)
        ways.remove("hivemind")
    seconds: dict[str, float] = {}
    trace = str(Path(given.trace).resolve()) if given.trace else ""
    try:
        with Wan(network) as wan:
            if wrong := [found for found in check(wan) if not found.agrees]:
                print(f"The emulated network is not as its file says, so nothing is measured: {wrong}", file=sys.stderr)
                return 1
        for way in ways:
            with Wan(network) as wan:
                print(f"{way} ...", file=sys.stderr, flush=True)
                python = given.hivemind if way == "hivemind" else sys.executable
                try:
                    seconds[way], error = measure(wan, python, way, given.turns, trace)
                except RuntimeError as problem:
                    print(f"{way} is left out: {problem}", file=sys.stderr)
                    continue
                assert error < {"i8b256": 0.02}.get(way, 1e-5), (way, error)
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    slowest = min(float(rate) for rate in network.bandwidth.flat if rate)
    if not seconds.keys() & {"gloo", "hivemind"}:
        show("Ours", [Row(way, value, "s") for way, value in seconds.items()], given.json)
        return 0
    title = f"32 MiB summed by four replicas over worldwide links, bandwidths divided by {divisor:.0f}"
    show(title, rows(seconds, slowest), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
