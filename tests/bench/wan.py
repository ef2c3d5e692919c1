"""Eight nodes across the paper's worldwide links: ``python -m tests.bench.wan [--json] [--steps N] [--only NAME ...]``.

Ours, placed by the scheduler and at random, beside torch.distributed's pipeline (torch_pipeline.py).

The network is emulated (tests/wan), one node in each of the paper's eight regions: its latencies, its bandwidths divided by
one number, which the title states. The network is checked against its file before anything is measured. Every way trains
the same model on the same samples in four stages of two replicas, so that they differ in placement and codec alone. A
step's time is the median from commit to commit; the first ones warm up.

Two yardsticks stand beside a way's time: what its plan was predicted to take, and the larger of the busiest link's bytes
over its rate and the busiest node's seconds of computing, below which no step can be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from subprocess import DEVNULL, PIPE

from dtfm.scheduler.networks import Network
from tests.bench.rows import Row, show
from tests.cluster.launch import ROOT
from tests.cluster.runs import write_corpus
from tests.wan.check import check
from tests.wan.cluster import wan_cluster
from tests.wan.networks import Scaled, eight_nodes
from tests.wan.wan import COORDINATOR, Wan, WanUnavailable

WARM_UP = 3
TOTAL_BANDWIDTH = 800e6 / 8
"""Bytes per second over all links: slow enough that links outweigh computing even with eight nodes on two cores."""
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train. ``shuffle``: the seed that places nodes at random; None: the scheduler does, and for torch.distributed
    they stand in region order."""

    name: str
    torch: bool = False
    compression: str = "off"
    shuffle: int | None = None


WAYS = (
    Way("scheduled, off"),
    Way("scheduled, auto", compression="auto"),
    Way("random 1, off", shuffle=1),
    Way("random 2, off", shuffle=2),
    Way("torch, random 1", torch=True, shuffle=1),
    Way("torch, random 2", torch=True, shuffle=2),
    Way("torch, region order", torch=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds per step: measured, and where there are such the prediction and what the busiest link and node need at least."""

    step: float
    predicted: float | None = None
    busiest_link: float | None = None
    busiest_node: float | None = None


def coordinator_of(way: Way) -> list[str]:
    """The module that is this way's coordinator, with what it takes first."""
    return ["dtfm.coordinator.cli"] if way.shuffle is None else ["tests.bench.blind", str(way.shuffle)]


def run_file(way: Way, steps: int) -> str:
    """The demo's model and data in four stages of two replicas."""
    return f"""
name = "wan"
[train]
steps = {steps}
evaluate_every = 0
evaluation_samples = 8
[data]
source = "corpus.txt"
[network]
compression = "{way.compression}"
[cluster]
nodes = 8
stages = [2, 2, 2, 2]
lease = 20.0
[checkpoint]
every = 0
"""


def measure_ours(way: Way, network: Scaled, steps: int) -> Outcome:
    """Trains ``steps`` steps, and some before, on a network of its own."""
    last = steps + WARM_UP
    with (
        tempfile.TemporaryDirectory() as folder,
        Wan(network.cluster) as wan,
        wan_cluster(wan, Path(folder), run_file(way, last), coordinator=coordinator_of(way)) as cluster,
    ):
        for name in network.cluster.ids:
            cluster.add(name)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == WARM_UP, timeout=PATIENCE_SECONDS)
        before = wan.traffic()
        cluster.wait_for("step_committed", where=lambda e: e["step"] == last, timeout=PATIENCE_SECONDS)
        after = wan.traffic()
        committed = cluster.of("step_committed")[WARM_UP:]
        predicted = cluster.of("plan_adopted")[-1]["predicted_seconds"]
        busiest = max(
            (after[pair].bytes - before[pair].bytes) / steps / wan.link(*pair).rate
            for pair in after
            if COORDINATOR not in pair
        )
    return Outcome(
        step=statistics.median(e["seconds"] for e in committed),
        predicted=None if way.shuffle is not None else predicted,
        busiest_link=busiest,
        busiest_node=statistics.median(max(e["compute_seconds"].values()) for e in committed),
    )


def measure_torch(way: Way, network: Scaled, steps: int) -> Outcome:
    """The same with torch.distributed: rank by rank in the order of the regions, or in one drawn at random."""
    names = list(network.cluster.ids)
    if way.shuffle is not None:
        Random(way.shuffle).shuffle(names)
    with tempfile.TemporaryDirectory() as folder, Wan(network.cluster) as wan:
        write_corpus(Path(folder))
        Path(folder, "run.toml").write_text(run_file(way, steps + WARM_UP))
        arguments = [wan.address(names[0]), str(steps + WARM_UP), "run.toml"]
        command = [sys.executable, "-m", "tests.bench.torch_pipeline"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ranks = [
            wan.run(name, [*command, str(rank), *arguments], cwd=folder, env=environment, stdout=PIPE, stderr=DEVNULL)
            for rank, name in enumerate(names)
        ]
        output, _ = ranks[-1].communicate(timeout=PATIENCE_SECONDS)
    return Outcome(step=statistics.median(json.loads(output)[WARM_UP:]))


def rows_of(way: Way, outcome: Outcome, first: tuple[Way, Outcome]) -> list[Row]:
    step = outcome.step
    rows = [Row(way.name, step, "s", *(() if way == first[0] else (first[0].name, step / first[1].step)))]
    parts = (
        ("predicted", outcome.predicted),
        ("busiest link", outcome.busiest_link),
        ("busiest node", outcome.busiest_node),
    )
    for part, seconds in parts:
        if seconds is not None:
            rows.append(Row(f"{way.name}: {part}", seconds, "s", "measured", seconds / step))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help=f"measured, after {WARM_UP} that warm up")
    parser.add_argument(
        "--only", nargs="+", choices=[way.name for way in WAYS], help="the first is what others are held to"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    network = eight_nodes(Network.WORLDWIDE, TOTAL_BANDWIDTH)
    try:
        with Wan(network.cluster) as wan:
            wrong = [found for found in check(wan) if not found.agrees]
    except WanUnavailable as reason:
        print(f"No network can be emulated here: {reason}", file=sys.stderr)
        return 2
    if wrong:
        print(f"The emulated network is not as its file says, so nothing is measured: {wrong}", file=sys.stderr)
        return 1
    chosen = [way for way in WAYS if arguments.only is None or way.name in arguments.only]
    outcomes: list[tuple[Way, Outcome]] = []
    for way in chosen:
        print(f"{way.name} ...", file=sys.stderr, flush=True)
        outcome = (measure_torch if way.torch else measure_ours)(way, network, arguments.steps)
        print(f"  {outcome}", file=sys.stderr, flush=True)
        outcomes.append((way, outcome))
    rows = [row for way, outcome in outcomes for row in rows_of(way, outcome, outcomes[0])]
    title = f"One step over worldwide links, bandwidths divided by {network.divisor:.0f}, {arguments.steps} steps each"
    show(title, rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
