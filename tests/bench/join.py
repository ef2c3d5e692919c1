"""How soon a joining node takes part: ``python -m tests.bench.join [--joins 5] [--json]``.

Two nodes train a model as replicas, over an emulated wide-area network. One is killed and returns as a new process without
state. The other sends it the state over its own uplink while it trains on. The time from the join to the first step in which
the node takes part is compared with the time of the state's bytes at 80 % of the link, plus one iteration.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dtfm.node.data.dataset import load_data
from dtfm.node.host.rows import Row, show
from dtfm.node.model.bucket import bucket_bytes
from dtfm.node.model.load import load_model
from dtfm.node.model.precision import run_dtype
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.cluster import Cluster, Node
from tests.cluster.launch import Event
from tests.cluster.recoveries import commits, contribution, median_and_worst
from tests.cluster.runs import write_corpus
from tests.wan.cluster import wan_cluster
from tests.wan.wan import Wan, WanUnavailable

NODES = ("a", "b")
LATENCY_SECONDS, RATE = 0.02, 5e6
"""One-way latency, and bytes per second of each node's connection in either direction."""
PART_OF_LINK = 0.8
WARM_UP = 5
PATIENCE_SECONDS = 240.0
RUN = """
name = "join"
[model]
config = { hidden_size = 256, num_hidden_layers = 8, num_attention_heads = 4, intermediate_size = 1024 }
[data]
source = "corpus.txt"
sequence_length = 64
[train]
steps = 1000000
global_batch = 16
micro_batch = 2
evaluate_every = 0
evaluation_samples = 2
[cluster]
nodes = 2
stages = [2]
lease = 10.0
[checkpoint]
every = 0
"""


def state_bytes(folder: Path, layers: range) -> int:
    """The bytes of the weights and moments of ``layers``."""
    run = read_run_file(folder / "run.toml").message("join")
    run.data.source = str(folder / "corpus.txt")
    model = load_model(run.model, load_data(run).sample)
    own = [spec for spec in model.buckets if any(layer in layers for layer in spec.layers)]
    return sum(bucket_bytes(spec, run_dtype(run)) for spec in own)


def reached(step: int) -> Callable[[Event], bool]:
    return lambda committed: int(committed["step"]) >= step


def measure(joins: int) -> list[Row]:
    """Raises WanUnavailable."""
    apart = 1 - np.eye(len(NODES))
    nodes = tuple(Node(name, 1, 1, up=RATE, down=RATE) for name in NODES)
    network = Cluster(nodes, apart * LATENCY_SECONDS, np.where(apart > 0, RATE, 0.0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        killed = []
        with Wan(network) as wan, wan_cluster(wan, folder, RUN) as cluster:
            for node in network.ids:
                cluster.add(node)
            cluster.wait_for("step_committed", where=reached(WARM_UP), timeout=PATIENCE_SECONDS)
            for _ in range(joins):
                first = cluster.of("plan_adopted")[-1]["plan"]["stages"][0]
                victim, begun = first["replicas"][-1], len(cluster.events)
                killed.append((victim, time.time()))
                cluster.nodes[victim].send(signal.SIGKILL)
                cluster.wait_for("node_left", after=begun)
                cluster.add(victim)
                back = cluster.wait_for(
                    "step_committed",
                    where=lambda e: len(e["compute_seconds"]) == len(NODES),
                    after=cluster.events.index(cluster.wait_for("node_joined", after=begun)),
                    timeout=PATIENCE_SECONDS,
                )
                cluster.wait_for("step_committed", where=reached(back["step"] + WARM_UP), timeout=PATIENCE_SECONDS)
            assert cluster.coordinator is not None
            cluster.coordinator.send(signal.SIGINT)
            cluster.finish()
            events = cluster.log()
            size = state_bytes(folder, range(*first["layers"]))
    iteration = statistics.median(e["seconds"] for e in commits(events) if len(e["compute_seconds"]) == len(NODES))
    taken = [began - joined for joined, began in (contribution(events, node, at) for node, at in killed)]
    transfer = size / RATE
    allowed = transfer / PART_OF_LINK + iteration
    return [
        Row("state over the bare link", transfer, "s"),
        Row("iteration, median", iteration, "s"),
        *median_and_worst("join to first step", taken, "s", f"transfer at {PART_OF_LINK:.0%} + iteration", allowed),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    if arguments.joins < 1:
        parser.error("at least one join")
    try:
        rows = measure(arguments.joins)
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    show(f"Joining over {RATE * 8 / 1e6:.0f} Mbit/s, {LATENCY_SECONDS * 1e3:.0f} ms", rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
