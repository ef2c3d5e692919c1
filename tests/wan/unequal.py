"""Eight nodes whose devices and links are unequal, and how long a step takes there under one plan or another."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from dtfm.coordinator.log.events import PlanAdopted, from_json
from dtfm.scheduler.model.cluster import Cluster as Network, Node
from dtfm.scheduler.model.plan import Plan
from tests.cluster.launch import Cluster, Process
from tests.wan.cluster import COMMAND, wan_cluster
from tests.wan.given_plan import Given
from tests.wan.wan import COORDINATOR, Wan

MBIT = 1e6 / 8
FASTEST = 2e9
"""FLOP/s. A core of a usual CPU computes this model ten times faster, so all nodes together take a fraction of a core."""
SLOWED = 3
"""In bf16, with codecs, a step that is as fast as in fp32 keeps this machine's cores busy for half of it."""
SLOWER = (1.4, 5.2, 2.7, 10, 1.9, 3.7, 1, 7.2)
"""How many times slower than FASTEST each device is."""
SITES = ("east", "east", "east", "west", "west", "west", "home", "home")
INSIDE, BETWEEN = 80.0, 24.0
"""Mbit/s of a link inside a site, and of any other link that no home's line limits."""
LINES = {"n6": (8.0, 40.0), "n7": (16.0, 50.0)}
"""Mbit/s that each home sends and receives."""
DISTANCE = {"east": 0.004, "west": 0.020, "home": 0.012}
"""Seconds from a site to the middle of the network."""
NAMES = tuple(f"n{number}" for number in range(len(SITES)))
LAYERS = 10
"""An embedding, eight blocks and a head."""
WARM_UP, WARM_UP_SHARED = 1, 5
"""Steps under a new plan that do not count: the first one, and on shared lines those beside which state is copied."""
LEASE, LEASE_SHARED = 6.0, 20.0
"""Seconds. On a shared line one connection may get nothing for some of them."""
FILE = "given-plan"
PATIENCE_SECONDS = 300.0


def unequal_network(*, shared_lines: bool) -> Network:
    """The links and devices: two sites with fast links inside, and two homes. With ``shared_lines`` a home's line limits all its
    links together, otherwise each of them."""
    lines = [LINES.get(name, (INSIDE, INSIDE)) for name in NAMES]
    latency, rate = np.zeros((len(NAMES), len(NAMES))), np.zeros((len(NAMES), len(NAMES)))
    for a, b in np.ndindex(rate.shape):
        inside = SITES[a] == SITES[b] != "home"
        if a != b:
            latency[a, b] = 0.001 if inside else DISTANCE[SITES[a]] + DISTANCE[SITES[b]]
            rate[a, b] = min(lines[a][0], lines[b][1], INSIDE if inside else BETWEEN) * MBIT
    shared = {name: (up * MBIT, down * MBIT) for name, (up, down) in LINES.items() if shared_lines}
    nodes = tuple(
        Node(name, FASTEST / slower, 1e9, site, *shared.get(name, (None, None)))
        for name, slower, site in zip(NAMES, SLOWER, SITES, strict=True)
    )
    return Network(nodes, latency, rate)


def drawn_network(seed: int) -> Network:
    """As many nodes, with devices as unequal in another order, in places from a data center to a home: a link carries what the
    narrower of its ends does, 1.3 to 26 Mbit/s, and takes 2 to 60 ms. All are SLOWED times slower than in `unequal_network`."""
    rng, count = Random(seed), len(NAMES)
    slower, rate, away = (
        rng.sample(SLOWER, count),
        [10 ** rng.uniform(0.6, 1.9) / SLOWED for _ in NAMES],
        [rng.uniform(0.001, 0.03) for _ in NAMES],
    )
    narrower = np.minimum.outer(rate, rate) * MBIT * (1 - np.eye(count))
    nodes = tuple(Node(name, FASTEST / SLOWED / slower[number], 1e9) for number, name in enumerate(NAMES))
    return Network(nodes, np.add.outer(away, away) * (1 - np.eye(count)), narrower)


def run_file(micro_batches: int, lease: float) -> str:
    """A Llama whose gradients are heavy for such links."""
    return f"""
name = "unequal"
[model]
config = {{ hidden_size = 96, num_hidden_layers = {LAYERS - 2}, num_attention_heads = 4, intermediate_size = 288 }}
[train]
steps = 100000
global_batch = {micro_batches}
micro_batch = 1
evaluate_every = 0
evaluation_samples = 1
[data]
source = "corpus.txt"
sequence_length = 64
[network]
compression = "off"
[cluster]
nodes = {len(NAMES)}
lease = {lease}
[checkpoint]
every = 0
"""


def random_plan(seed: int) -> Given:
    """All nodes in random stages, and random cuts."""
    rng = Random(seed)
    stages = rng.randint(1, len(NAMES))
    order = rng.sample(NAMES, len(NAMES))
    groups = [[name] for name in order[:stages]]
    for name in order[stages:]:
        rng.choice(groups).append(name)
    cuts = (0, *sorted(rng.sample(range(1, LAYERS), stages - 1)), LAYERS)
    return Given(tuple(tuple(group) for group in groups), cuts)


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan, the seconds per step that the scheduler predicted for it, and those of each step that counts."""

    plan: Plan
    predicted: float
    steps: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.steps)

    @property
    def ratio(self) -> float:
        """What was measured over what was predicted."""
        return self.seconds / self.predicted

    def gain(self, other: Measured) -> float:
        """How many times faster than ``other`` this plan is, over how many times faster it was predicted to be."""
        return other.ratio / self.ratio


class UnequalRun:
    """A run that trains, and changes its plan when told to."""

    def __init__(self, wan: Wan, cluster: Cluster, warm_up: int) -> None:
        self._wan = wan
        self._cluster = cluster
        self._warm_up = warm_up

    def measure(self, steps: int) -> Measured:
        """Trains ``steps`` steps, after the warm-up, under the plan in force."""
        cluster = self._cluster
        adopted = from_json(cluster.of("plan_adopted")[-1])
        assert isinstance(adopted, PlanAdopted)
        assert adopted.predicted_seconds is not None
        last = adopted.step + self._warm_up + steps
        cluster.wait_for("step_committed", where=lambda e: e["step"] == last, timeout=PATIENCE_SECONDS)
        counted = [e for e in cluster.of("step_committed") if last - steps < e["step"] <= last]
        assert {e["generation"] for e in counted} == {adopted.generation}, "the plan has changed meanwhile"
        return Measured(adopted.plan, adopted.predicted_seconds, tuple(e["seconds"] for e in counted))

    def adopt(self, given: Given) -> None:
        """Changes to this plan."""
        cluster = self._cluster
        given.write(cluster.folder / FILE)
        begun = len(cluster.events)
        command = [sys.executable, "-m", COMMAND, "plan-now", cluster.address]
        asking = Process(self._wan.inside(COORDINATOR, command), cluster.folder)
        try:
            assert asking.wait(PATIENCE_SECONDS) == 0, asking.errors
            cluster.wait_for("plan_started", after=begun, timeout=PATIENCE_SECONDS)
        finally:
            asking.close()


@contextmanager
def unequal_run(folder: Path, network: Network, run: str, *, shared_lines: bool = False) -> Iterator[UnequalRun]:
    """A run that has begun with the scheduler's own plan. With ``shared_lines`` homes join one after the other: on a line that
    is shared, one node's probes slow down another's."""
    flops = {node.id: node.flops for node in network.nodes}
    command = ("tests.wan.given_plan", FILE)
    with (
        Wan(network) as wan,
        wan_cluster(wan, folder, run, coordinator=command, flops=flops) as cluster,
    ):
        for number, name in enumerate(NAMES):
            if shared_lines and name in LINES:
                _wait_for_nodes(cluster, number)
            cluster.add(name)
        cluster.wait_for("plan_started", timeout=PATIENCE_SECONDS)
        yield UnequalRun(wan, cluster, WARM_UP_SHARED if shared_lines else WARM_UP)


def _wait_for_nodes(cluster: Cluster, count: int) -> None:
    cluster.wait_for("waiting", where=lambda e: e["reason"].startswith(f"{count} of "))


def against_random_plans(
    folder: Path, seeds: Sequence[int], steps: int, *, micro_batches: int, shared_lines: bool
) -> Iterator[Measured]:
    """The scheduler's plan, then the random plan of each seed, each measured over ``steps`` steps of one run."""
    network, lease = unequal_network(shared_lines=shared_lines), LEASE_SHARED if shared_lines else LEASE
    with unequal_run(folder, network, run_file(micro_batches, lease), shared_lines=shared_lines) as run:
        yield run.measure(steps)
        for seed in seeds:
            run.adopt(random_plan(seed))
            yield run.measure(steps)


def on_drawn_networks(folder: Path, seeds: Sequence[int], steps: int, *, micro_batches: int) -> Iterator[Measured]:
    """The scheduler's plan on the drawn network of each seed, in bf16 and with the codecs that nodes choose."""
    run = run_file(micro_batches, LEASE).replace('compression = "off"', 'compression = "auto"')
    run = run.replace("[train]\n", '[train]\nprecision = "bf16"\nrounds = 0\n')
    for seed in seeds:
        (folder / str(seed)).mkdir()
        with unequal_run(folder / str(seed), drawn_network(seed), run) as running:
            yield running.measure(steps)
