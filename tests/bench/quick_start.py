"""From the command to the first contributed step: ``python -m tests.bench.quick_start [--turns 3] [--json]``.

Two nodes train a model over an emulated wide-area network of 100 Mbit/s and 40 ms. A third one joins by the command that people
paste, with an invitation, as a process of its own. Cold, it finds nothing compiled: no Python bytecode, no codecs. Warm, it
finds what the cold one has left. A part ends when the node prints a line, or the coordinator an event. Ratios are against the
whole.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.bench.rows import Row, show
from tests.cluster.launch import ROOT, Event
from tests.cluster.nursery import close_nursery
from tests.cluster.recoveries import commits
from tests.cluster.runs import write_corpus
from tests.wan.cluster import wan_cluster
from tests.wan.shape import Link, usual_queue_bytes
from tests.wan.wan import Wan, WanUnavailable

EARLIER, PLACE = ("a", "b"), "c"
LATENCY_SECONDS, RATE = 0.04, 12.5e6
"""One-way latency, and bytes per second of each node's connection in either direction."""
EARLIER_FLOPS = 8e9
"""FLOP/s of the devices of nodes that train already, so that the newcomer has this machine's cores."""
WARM_UP = 3
PATIENCE_SECONDS = 240.0
RUN = """
name = "quick-start"
[model]
config = { hidden_size = 192, num_hidden_layers = 6, num_attention_heads = 4, intermediate_size = 512 }
[data]
source = "python-stdlib"
sequence_length = 128
[train]
steps = 1000000
global_batch = 48
micro_batch = 2
evaluate_every = 0
evaluation_samples = 2
[network]
compression = "i8b256"
[cluster]
nodes = 2
[checkpoint]
every = 0
"""
PARTS = (
    ("Python, PyTorch, the device", "GFLOP/s in matrix products"),
    ("enrolment, certificate, welcome", "loading its data"),
    ("data, model, device timing, codecs", "device_timed"),
    ("measuring links", "node_ready"),
    ("waiting for a plan", "from the coordinator: standby"),
    ("copying state", "plan_adopted"),
    ("setting up the plan", "plan_started"),
    ("first step", "step_committed"),
)
"""The name of each part, and the line or event at its end."""


class Newcomer:
    """One join, with the times when it prints each line (seconds of the wall clock)."""

    def __init__(self, wan: Wan, folder: Path, name: str, invitation: str, caches: Path) -> None:
        self.name = name
        self._lines: list[tuple[float, str]] = []
        self.began = time.time()
        self._process = wan.run(
            PLACE,
            [sys.executable, "-m", "dtfm.node.cli", "join", "--id", name, "--device", "cpu", "--threads", "1", "-v"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
                "PYTHONPATH": str(ROOT),
                "DTFM_INVITATION": invitation,
                "DTFM_ALLOW_DATA": str(folder),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "XDG_STATE_HOME": str(folder / f"state-{name}"),
                "XDG_CACHE_HOME": str(caches),
                "NUMBA_CACHE_DIR": str(caches / "numba"),
                "PYTHONPYCACHEPREFIX": str(caches / "bytecode"),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def said(self, part: str) -> float | None:
        """The time when it first printed a line with ``part``."""
        return next((at for at, line in self._lines if part in line), None)

    @property
    def printed(self) -> str:
        return "".join(f"{at - self.began:7.2f} {line}" for at, line in self._lines)

    def leave(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._reader.join(10)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.append((time.time(), line))


def parts_of(newcomer: Newcomer, events: list[Event]) -> dict[str, float]:
    """Seconds of each part, in order. A part that was over before the one before it takes nothing."""
    at, taken = newcomer.began, {}
    first = next(e for e in commits(events) if newcomer.name in e["compute_seconds"])
    for name, mark in PARTS:
        here = [
            e["time"]
            for e in events
            if e["event"] == mark and e["time"] > at and e.get("node", newcomer.name) == newcomer.name
        ]
        if mark == "step_committed":
            here = [first["time"]]
        elif mark in ("plan_adopted", "plan_started"):
            here = [e["time"] for e in events if e["event"] == mark and e["generation"] == first["generation"]]
        said = newcomer.said(mark)
        ended = max(at, here[0] if here else said if said is not None else at)
        taken[name] = ended - at
        at = ended
    return taken


def takes_part(node: str) -> Callable[[Event], bool]:
    return lambda committed: node in committed["compute_seconds"]


def measure(turns: int, verbose: bool) -> list[Row]:
    """Measures quick starts. Raises WanUnavailable."""
    names = (*EARLIER, PLACE)
    apart = 1 - np.eye(len(names))
    network = Cluster(
        tuple(Node(name, 1, 1, up=RATE, down=RATE) for name in names),
        apart * LATENCY_SECONDS,
        np.where(apart > 0, RATE, 0.0),
    )
    control = Link(LATENCY_SECONDS, RATE, usual_queue_bytes(LATENCY_SECONDS, RATE))
    taken: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as name, Wan(network, control=control) as wan:
        folder = Path(name)
        write_corpus(folder)
        flops = dict.fromkeys(EARLIER, EARLIER_FLOPS)
        with wan_cluster(wan, folder, RUN, flops=flops) as cluster:
            for node in EARLIER:
                cluster.add(node)
            cluster.wait_for("step_committed", where=lambda e: int(e["step"]) >= WARM_UP, timeout=PATIENCE_SECONDS)
            for turn in range(turns):
                for kind, each in taken.items():
                    name, begun = f"{kind}-{turn}", len(cluster.events)
                    newcomer = Newcomer(wan, folder, name, cluster.invitation, folder / f"caches-{turn}")
                    try:
                        cluster.wait_for(
                            "step_committed",
                            where=takes_part(name),
                            after=begun,
                            timeout=PATIENCE_SECONDS,
                        )
                    finally:
                        if verbose:
                            print(newcomer.printed, file=sys.stderr)
                    newcomer.leave()
                    cluster.wait_for("node_left", after=begun)
                    each.append(parts_of(newcomer, cluster.log()))
                    print(f"{kind}: {sum(each[-1].values()):.1f} s", file=sys.stderr, flush=True)
                    cluster.wait_for("step_committed", after=len(cluster.events))
            assert cluster.coordinator is not None
            cluster.coordinator.send(signal.SIGINT)
            cluster.finish()
    rows = []
    for kind, each in taken.items():
        whole = f"{kind}: command to first contributed step"
        seconds = statistics.median(sum(parts.values()) for parts in each)
        rows.append(Row(whole, seconds, "s"))
        for name, _ in PARTS:
            part = statistics.median(parts[name] for parts in each)
            rows.append(Row(f"{kind}: {name}", part, "s", whole, part / seconds))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="cold and warm joins, each")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--verbose", action="store_true", help="show what the newcomer prints, and when")
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error("at least one turn")
    try:
        rows = measure(arguments.turns, arguments.verbose)
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    finally:
        close_nursery()
    show(f"A newcomer over {RATE * 8 / 1e6:.0f} Mbit/s, {LATENCY_SECONDS * 1e3:.0f} ms", rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
