"""How long a step's samples take over home lines, as time_to_loss.py asks.

Equal nodes, each with a slow device (tests/wan/slow_device.py), train one model over emulated links. A value is the mean time for
a step's samples, with the exchange's share of a round; the first step or round does not count.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtfm.scheduler.model.cluster import Cluster as Network, Node
from dtfm.scheduler.model.rounds import MEASURED
from tests.cluster.launch import Cluster, Event
from tests.wan.cluster import wan_cluster
from tests.wan.unequal import FASTEST, LEASE_SHARED, MBIT, PATIENCE_SECONDS, run_file
from tests.wan.wan import Wan

MICRO_BATCHES = 32
DISTANCE = 0.010
"""Seconds from a home to the middle of the network."""
COUNTED = 4
"""The measured steps; with rounds, two rounds."""
CONSTANT = 'evaluation_samples = 32\nschedule = "constant"\n'


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds for a step's samples, as measured and as predicted, and the number of islands. ``exchange``: the seconds of an
    exchange of these islands. ``length``: of rounds."""

    seconds: float
    predicted: float
    islands: int
    exchange: float = 0.0
    length: int = 0


def homes(count: int, down: float, up: float) -> Network:
    """Nodes in different homes. All links of a home share its line: ``down`` and ``up`` Mbit/s."""
    away = 1 - np.eye(count)
    nodes = tuple(Node(f"n{number}", FASTEST, 1e9, "", up * MBIT, down * MBIT) for number in range(count))
    return Network(nodes, 2 * DISTANCE * away, min(down, up) * MBIT * away)


def are_ready(count: int) -> Callable[[Event], bool]:
    return lambda event: event["reason"].startswith(f"{count} of ")


@contextmanager
def running(
    network: Network,
    length: int | None,
    folder: Path,
    evaluate_every: int = 0,
    change: Callable[[str], str] = lambda text: text,
    later: Collection[str] = (),
) -> Iterator[tuple[Wan, Cluster]]:
    """A context in which the nodes of the network train, with slow devices, except those that come ``later``. ``length``: of
    rounds; None: the run decides. ``change``: of the run file."""
    slowest = network.bandwidth[network.bandwidth > 0].min(initial=MBIT) / MBIT  # Mbit/s, at most 1
    text = run_file(MICRO_BATCHES, LEASE_SHARED / slowest).replace('compression = "off"\n', "")
    text = f"seed = 1\n{text}".replace("nodes = 8", f"nodes = {len(network.nodes)}")
    steps = 100 * (length + 1) if length is not None else math.prod(each + 1 for each in MEASURED)
    rounds = '"auto"' if length is None else length
    text = text.replace("steps = 100000", f"steps = {steps}\nrounds = {rounds}")
    text = text.replace(
        "evaluate_every = 0\nevaluation_samples = 1\n", f"evaluate_every = {evaluate_every}\n{CONSTANT}"
    )
    text = change(text.replace(f"nodes = {len(network.nodes)}", f"nodes = {len(network.nodes) - len(later)}"))
    flops = {node.id: node.flops for node in network.nodes}
    with Wan(network) as wan, wan_cluster(wan, folder, text, flops=flops) as cluster:
        for number, name in enumerate(name for name in network.ids if name not in later):
            if number:  # on a line that is shared, one node's probes slow down another's
                cluster.wait_for("waiting", where=are_ready(number), timeout=PATIENCE_SECONDS)
            cluster.add(name)
        yield wan, cluster


def measure(network: Network, length: int | None, folder: Path) -> Measured:
    with running(network, length, folder) as (_, cluster):
        if length is None:
            cluster.wait_for("plan_started", timeout=PATIENCE_SECONDS)
            rounds = cluster.of("plan_adopted")[-1]["plan"]["rounds"]
            length = rounds["steps"] // rounds["count"] - 1 if rounds["count"] else 0
        counted = 2 * (length + 1) if length else COUNTED
        last = length + 1 + counted
        cluster.wait_for(
            "step_committed", where=lambda e: e["step"] == last, timeout=PATIENCE_SECONDS * (1 + last / 100)
        )
        committed = [e for e in cluster.of("step_committed") if last - counted < e["step"] <= last]
        took, exchanges = [e["seconds"] for e in committed], [e["seconds"] for e in committed if e["exchange"]]
        adopted, *_ = plans = [e for e in reversed(cluster.of("plan_adopted")) if e["predicted_seconds"]]
        trained = length / (length + 1) if length else 1.0
        stages = adopted["plan"]["stages"]
        told = re.search(r" islands exchange every \d+ steps: ([\d.]+) s", adopted["reason"])
        predicted = adopted["predicted_seconds"] + (float(told[1]) / length if told else 0.0)
        print(f"{adopted['reason']} {took}, plan {len(plans)}", file=sys.stderr, flush=True)
        islands, exchange = len({stage.get("island", 0) for stage in stages}), sum(exchanges) / max(len(exchanges), 1)
        return Measured(sum(took) / len(took) / trained, predicted, islands, exchange, length)
