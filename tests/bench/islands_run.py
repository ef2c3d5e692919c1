"""What islands bring over home lines, in seconds: ``python -m tests.bench.islands_run [--nodes 4] [--rounds 10] [--mbit 8]
[--json]``.

Equal nodes, each with a slow device (tests/wan/slow_device.py) and a home line of its own, train one model over emulated links:
one node alone, then all of them without rounds, then with rounds. A value is the mean time for a step's samples, with the
exchange's share of a round; the first step or round does not count. It is compared with what the scheduler predicted, and with
one node alone. This says nothing about the loss: see tests/bench/islands.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtfm.node.host.rows import Row, show
from dtfm.scheduler.model.cluster import Cluster as Network, Node
from dtfm.scheduler.model.rounds import Rounds
from tests.cluster.launch import Cluster, Event
from tests.wan.cluster import wan_cluster
from tests.wan.unequal import FASTEST, LEASE_SHARED, MBIT, PATIENCE_SECONDS, run_file
from tests.wan.wan import Wan, WanUnavailable

MICRO_BATCHES = 32
DISTANCE = 0.010
"""Seconds from a home to the middle of the network."""
COUNTED = 4
"""Steps, or 2 rounds."""
CONSTANT = 'evaluation_samples = 32\nschedule = "constant"\n'


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds for a step's samples, as measured and as predicted, and the number of islands. ``exchange``: the seconds that this
    many islands take for one."""

    seconds: float
    predicted: float
    islands: int
    exchange: float = 0.0


def homes(count: int, down: float, up: float) -> Network:
    """Nodes in different homes. All links of a home share its line, which carries so many Mbit/s."""
    away = 1 - np.eye(count)
    nodes = tuple(Node(f"n{number}", FASTEST, 1e9, "", up * MBIT, down * MBIT) for number in range(count))
    return Network(nodes, 2 * DISTANCE * away, min(down, up) * MBIT * away)


def are_ready(count: int) -> Callable[[Event], bool]:
    return lambda event: event["reason"].startswith(f"{count} of ")


@contextmanager
def running(network: Network, rounds: Rounds, folder: Path, evaluate_every: int = 0) -> Iterator[Cluster]:
    """All nodes of the network train, with slow devices."""
    slowest = network.bandwidth[network.bandwidth > 0].min(initial=MBIT) / MBIT
    text = run_file(MICRO_BATCHES, LEASE_SHARED / min(1.0, slowest)).replace('compression = "off"\n', "")
    text = f"seed = 1\n{text}".replace("nodes = 8", f"nodes = {len(network.nodes)}")
    text = text.replace("steps = 100000", f"steps = {100000 * rounds.stride}\nrounds = {rounds.length}")
    text = text.replace(
        "evaluate_every = 0\nevaluation_samples = 1\n", f"evaluate_every = {evaluate_every}\n{CONSTANT}"
    )
    flops = {node.id: node.flops for node in network.nodes}
    with Wan(network) as wan, wan_cluster(wan, folder, text, flops=flops) as cluster:
        for number, name in enumerate(network.ids):
            if number:  # on a line that is shared, one node's probes slow down another's
                cluster.wait_for("waiting", where=are_ready(number), timeout=PATIENCE_SECONDS)
            cluster.add(name)
        yield cluster


def measure(network: Network, rounds: Rounds, folder: Path) -> Measured:
    counted = 2 * rounds.stride if rounds.length else COUNTED
    with running(network, rounds, folder) as cluster:
        last = rounds.stride + counted
        cluster.wait_for(
            "step_committed", where=lambda e: e["step"] == last, timeout=PATIENCE_SECONDS * (1 + last / 100)
        )
        committed = [e for e in cluster.of("step_committed") if last - counted < e["step"] <= last]
        took, exchanges = ([e["seconds"] for e in committed if e["exchange"] >= only] for only in (False, True))
        adopted = cluster.of("plan_adopted")[-1]
        trained = rounds.trained(counted) / counted
        stages = adopted["plan"]["stages"]
        told = re.search(r" islands exchange every \d+ steps: ([\d.]+) s", adopted["reason"])
        predicted = adopted["predicted_seconds"] + (float(told[1]) / rounds.length if told else 0.0)
        print(adopted["reason"], took, file=sys.stderr, flush=True)
        islands, exchange = len({stage.get("island", 0) for stage in stages}), sum(exchanges) / max(len(exchanges), 1)
        return Measured(sum(took) / len(took) / trained, predicted, islands, exchange)


def rows_of(found: Sequence[tuple[str, Measured]]) -> list[Row]:
    rows, alone = [], found[0][1]
    for name, each in found:
        what = f"{name}, {each.islands} islands" if each.islands > 1 else name
        ratio = each.seconds / each.predicted
        rows.append(Row(f"{what}: a step's samples", each.seconds, "s", f"{each.predicted:.3g} s predicted", ratio))
        if each is not alone:
            rows.append(Row(f"{what}: a step's samples", each.seconds, "s", found[0][0], each.seconds / alone.seconds))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--mbit", type=float, default=8.0, help="Mbit/s of each home's line, up and down")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    found = []
    try:
        for name, count, length in (
            ("one node alone", 1, 0),
            (f"{options.nodes} nodes without rounds", options.nodes, 0),
            (f"{options.nodes} nodes, rounds = {options.rounds}", options.nodes, options.rounds),
        ):
            with tempfile.TemporaryDirectory() as folder:
                found.append((name, measure(homes(count, options.mbit, options.mbit), Rounds(length), Path(folder))))
            print(f"{name}: {found[-1][1]}", file=sys.stderr, flush=True)
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    show(
        f"{options.nodes} homes with {options.mbit:g} Mbit/s, as measured and as predicted",
        rows_of(found),
        options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
