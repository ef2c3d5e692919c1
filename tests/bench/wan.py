"""Eight nodes across the paper's worldwide links: ``python -m tests.bench.wan [--json] [--only NAME ...]``; all take an hour.

Ours, with placement by the scheduler and at random, is compared with torch.distributed's pipeline (torch_pipeline.py).

The network is emulated (tests/wan), with one node in each of the paper's eight regions. It has the paper's latencies, and its
bandwidths divided by one number, which the title states. It is checked against its file before anything is measured. Nodes join
one after the other, as they share cores here and would disturb each other's measurements of their devices. A step's time is the
median from commit to commit; the first step warms up.

The job keeps the proportions of the paper's job (arXiv 2206.01288, section 4): GPT3-1.3B, 8 stages of 3 layers x 8 replicas,
micro-batches of one sequence, 128 per pipeline and step, 1,024 sequences in all. (The scripts aws_run_batch_gpt3_optimal.sh and
dist_gpipe_pipeline_async.py run 64 twice and update the weights once.)

- The activations of a micro-batch cross a link that stands for 1 Gbit/s in 160 ms (paper: 8.4 MB, 67 ms). Latencies are 11 to
  238 ms in both.
- A stage computes a micro-batch in about 40 ms, with all nodes on two cores (paper: 1.9 TFLOP, 37 ms at 50 TFLOP/s). Relative
  to the links, that is half as long as the paper's. With faster links the cores, which belong to no network, would decide.
- Filling and draining take 3 of 128 micro-batches, in 4 stages and 2 pipelines (paper: 7 of 128, in 8 stages and 8 pipelines).
- On a link, gradients have a tenth of the bytes of activations, 0.96 and 9.4 MB (paper: three twentieths, 163 and 1,074 MB).

Every way trains the same model on the same samples in four stages. For torch.distributed each stage has two layers and two
replicas. Its random placements have the seeds 1 to 3; their median counts. Ours chooses layers, replicas and routes, and may
leave nodes idle. It is told each node's share of a core (crowded.py). For its random placement it sees all nodes and links as
equal, in an order that a seed decides (blind.py).

Several values explain a way's time:

- The time that its plan was predicted to take when it was adopted.
- The time that the scheduler's simulation gives for this plan, with the devices' speeds in training, over the emulated links.
- Lower bounds of a step: the busiest link's bytes over its rate; the busiest node's seconds of computing; and the processor
  seconds of the whole machine over its cores, which all nodes share.
- The parts of a step, and of the busiest link, from the nodes' traces (explain.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from subprocess import DEVNULL, PIPE

from dtfm.coordinator.core.validation.description import as_the_run_says
from dtfm.coordinator.log.events import PlanAdopted, RunDescribed, from_json
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.formats.paper import Network
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.workload import Workload
from tests.bench.crowded import share_of_a_core
from tests.bench.explain import link_parts_of, medians, parts_of, read_traces
from tests.bench.rows import Row, show
from tests.cluster.launch import ROOT
from tests.cluster.runs import write_corpus
from tests.wan.check import check
from tests.wan.cluster import wan_cluster
from tests.wan.networks import Scaled, eight_nodes
from tests.wan.wan import COORDINATOR, Wan, WanUnavailable

WARM_UP = 1
CORES = len(os.sched_getaffinity(0))
TOTAL_BANDWIDTH = 150e6 / 8
"""Bytes per second over all links."""
PATIENCE_SECONDS = 1800.0
UNLIMITED = 1e12
"""A node's bytes per second with all its peers together: the emulator limits only links."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train. ``shuffle``: the seed of a random placement. None: the scheduler places nodes; for torch.distributed they
    are in region order."""

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
    Way("torch, random 3", torch=True, shuffle=3),
    Way("torch, region order", torch=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds per step. ``beside``: the values that explain our time, by name."""

    step: float
    beside: Mapping[str, float] = field(default_factory=dict)


def coordinator_of(way: Way, share: float) -> list[str]:
    """The module of this way's coordinator, with its first arguments."""
    return ["tests.bench.crowded", str(share)] if way.shuffle is None else ["tests.bench.blind", str(way.shuffle)]


def run_file(way: Way, steps: int) -> str:
    """A Llama of eight layers, in four stages."""
    return f"""
name = "wan"
[model]
config = {{ hidden_size = 96, num_hidden_layers = 8, num_attention_heads = 4, intermediate_size = 288 }}
[train]
steps = {steps}
global_batch = 256
micro_batch = 1
evaluate_every = 0
evaluation_samples = 8
[data]
source = "corpus.txt"
sequence_length = 192
[network]
compression = "{way.compression}"
[cluster]
nodes = 8
stages = 4
lease = 20.0
[checkpoint]
every = 0
"""


def measure_ours(way: Way, network: Scaled, steps: int, share: float) -> Outcome:
    """Trains ``steps`` steps after some warm-up steps, on a new network. ``share``: see share_of_a_core."""
    last = steps + WARM_UP
    with (
        tempfile.TemporaryDirectory() as folder,
        Wan(network.cluster) as wan,
        wan_cluster(wan, Path(folder), run_file(way, last), coordinator=coordinator_of(way, share)) as cluster,
    ):
        for name in network.cluster.ids:
            cluster.add(name, "--trace", f"{name}.json")
            cluster.wait_for("node_ready", after=len(cluster.events), timeout=PATIENCE_SECONDS)
        cluster.wait_for("step_committed", where=lambda e: e["step"] == WARM_UP, timeout=PATIENCE_SECONDS)
        before, processors = wan.traffic(), processor_seconds()
        cluster.wait_for("step_committed", where=lambda e: e["step"] == last, timeout=PATIENCE_SECONDS)
        after, processors = wan.traffic(), processor_seconds() - processors
        committed = cluster.of("step_committed")[WARM_UP:]
        adopted = from_json(cluster.of("plan_adopted")[-1])
        described = from_json(cluster.of("run_described")[-1])
        run = read_run_file(cluster.run_file)
        busiest, link = max(
            ((after[pair].bytes - before[pair].bytes) / steps / wan.link(*pair).rate, pair)
            for pair in after
            if COORDINATOR not in pair
        )
        cluster.wait_for("run_finished", timeout=PATIENCE_SECONDS)  # the last step is applied, and in the traces
        nodes = read_traces(Path(folder))
    measured = range(WARM_UP + 1, last + 1)
    parts = medians([parts_of(step, nodes) for step in measured])
    of_link = medians([link_parts_of(step, nodes, link) for step in measured])
    assert isinstance(adopted, PlanAdopted)
    assert isinstance(described, RunDescribed)
    plan, workload = adopted.plan, described.described.workload
    computed = {node: statistics.median(e["compute_seconds"][node] for e in committed) for node in plan.nodes}
    beside = {} if way.shuffle is not None else {"predicted": adopted.predicted_seconds or math.inf}
    beside["simulated at measured speeds"] = simulated(plan, as_the_run_says(workload, run), computed, network.cluster)
    beside |= {"busiest link": busiest, "busiest node": max(computed.values()), "all cores": processors / CORES / steps}
    beside |= asdict(parts) | {f"busiest link, {part}": seconds for part, seconds in asdict(of_link).items()}
    return Outcome(statistics.median(e["seconds"] for e in committed), beside)


def processor_seconds() -> float:
    """The processor seconds of the whole machine since it started."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def simulated(plan: Plan, workload: Workload, computed: Mapping[str, float], cluster: Cluster) -> float:
    """The seconds of a step over the emulated network, with devices that need ``computed`` seconds for their parts."""
    draft = draft_of(plan, cluster)
    flops = Problem(cluster, workload).flops_before
    speeds = {node.id: node.flops for node in cluster.nodes}
    for stage in plan.stages:
        work = 3 * float(flops[stage.layers[1]] - flops[stage.layers[0]])
        for node, count in zip(stage.replicas, stage.loads, strict=True):
            if work and count:  # an embedding alone computes nothing
                speeds[node] = work * count / computed[node]
    nodes = tuple(replace(node, flops=speeds[node.id], up=UNLIMITED, down=UNLIMITED) for node in cluster.nodes)
    as_seen = replace(cluster, nodes=nodes)
    return simulate(Problem(as_seen, workload), draft)


def measure_torch(way: Way, network: Scaled, steps: int) -> Outcome:
    """Measures torch.distributed, with ranks in the order of the regions or in a random one."""
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
    seconds = json.loads(output)
    print(f"  steps of {seconds} s", file=sys.stderr, flush=True)
    return Outcome(step=statistics.median(seconds[WARM_UP:]))


def rows_of(way: Way, outcome: Outcome, first: tuple[Way, Outcome]) -> list[Row]:
    step = outcome.step
    rows = [Row(way.name, step, "s", *(() if way == first[0] else (first[0].name, step / first[1].step)))]
    return rows + [
        Row(f"{way.name}: {part}", seconds, "s", "measured", seconds / step) for part, seconds in outcome.beside.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help=f"steps that are measured, after {WARM_UP} that warms up")
    parser.add_argument(
        "--torch-steps", type=int, default=1, help="the same for torch.distributed, whose steps take minutes"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[way.name for way in WAYS], help="the others are compared with the first"
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
    share = share_of_a_core(len(network.cluster.ids))
    outcomes: list[tuple[Way, Outcome]] = []
    for way in chosen:
        print(f"{way.name} ...", file=sys.stderr, flush=True)
        outcome = (
            measure_torch(way, network, arguments.torch_steps)
            if way.torch
            else measure_ours(way, network, arguments.steps, share)
        )
        print(f"  {outcome}", file=sys.stderr, flush=True)
        outcomes.append((way, outcome))
    rows = [row for way, outcome in outcomes for row in rows_of(way, outcome, outcomes[0])]
    title = f"One step over worldwide links, bandwidths divided by {network.divisor:.0f}, {arguments.steps} steps each"
    if any(way.torch for way in chosen):
        title += f" (torch: {arguments.torch_steps})"
    title += f"; each node has {share:.2f} of a core"
    show(title, rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
