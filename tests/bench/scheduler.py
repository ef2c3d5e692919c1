"""The quality of the scheduler's plans, and how fast it finds them.

    python -m tests.bench.scheduler [--json] [--quick] [--replays N]

One row per measure; ``ratio`` is the value over the value of ``against``. One core; nodes are shuffled before planning.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
from scipy.stats import spearmanr

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.bound.stage_bounds import work_bound
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.budget import Budget
from dtfm.scheduler.search.exact import improve
from tests.bench.clusters import (
    part_of,
    random_cluster,
    random_groups,
    random_workload,
    regional_cluster,
)
from tests.bench.replay import WAYS, follow
from tests.bench.rows import Row, show

UNLIMITED = 1_000_000


def small_clusters(sizes: dict[int, int], layers: int) -> Iterator[Row]:
    """Compares plans with the best of all choices of groups and cuts. ``sizes``: by number of nodes, the number of clusters."""
    for count, clusters in sizes.items():
        ratios, tight, loose = [], [], []
        for seed in range(clusters):
            cluster, workload = random_cluster(seed, count), random_workload(seed, layers, micro_batches=6)
            decision = schedule(cluster, workload, seed=seed)
            best = branched_seconds(cluster, workload, decision.plan)
            ratios.append(decision.predicted.iteration_seconds / best)
            tight.append(decision.lower_bound_seconds / best)
            loose.append(work_bound(Problem(cluster, workload)) / best)
        title = f"{count} nodes, {layers} layers"
        equal = sum(ratio < 1 + 1e-9 for ratio in ratios)
        yield Row(f"{title}: plans as good as the best", equal, "plans", "clusters", equal / clusters)
        yield Row(f"{title}: worst plan", max(ratios), "x", "the best", max(ratios))
        bound, devices = statistics.median(tight), statistics.median(loose)
        yield Row(f"{title}: certified bound, median", bound, "of the best", "devices alone", bound / devices)


def branched_seconds(cluster: Cluster, workload: Workload, found: Plan) -> float:
    """The best of all plans according to the simulation: by the scheduler's own branch and bound, without a limit."""
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)
    draft = draft_of(found, cluster)
    start = evaluator.simulated(draft.groups, draft.cuts)
    shape = Shape(most_stages=min(len(cluster.nodes), len(workload.layers)))
    best, _, _ = improve(evaluator, shape, start, Budget(steps=UNLIMITED))
    return best.seconds


def estimate_against_simulation(clusters: int) -> Iterator[Row]:
    ranks, errors, fast_times, exact_times = [], [], [], []
    for seed in range(clusters):
        rng = Random(seed)
        nodes = rng.choice([4, 8, 12, 16])
        problem = Problem(random_cluster(seed, nodes), random_workload(seed, rng.choice([8, 24]), rng.choice([8, 32])))
        evaluator = Evaluator(problem, keep_idle_hands=False)
        began = time.perf_counter()
        drawn = [evaluator.estimated(random_groups(rng, nodes)) for _ in range(50)]
        fast_times.append((time.perf_counter() - began) / 50)
        found = [candidate for candidate in drawn if candidate.feasible]
        began = time.perf_counter()
        exact = np.array([simulate(problem, candidate.draft) for candidate in found])
        exact_times.append((time.perf_counter() - began) / len(found))
        fast = np.array([candidate.seconds for candidate in found])
        ranks.append(float(spearmanr(fast, exact)[0]))
        errors += (np.abs(fast - exact) / exact).tolist()
    rank, error = statistics.mean(ranks), statistics.median(errors)
    yield Row("estimate against simulation: rank correlation, mean", rank, "", "goal 0.95", rank / 0.95)
    yield Row("estimate against simulation: rank correlation, least", min(ranks), "", "goal 0.95", min(ranks) / 0.95)
    yield Row("estimate against simulation: median error", error, "", "goal 0.1", error / 0.1)
    fast_ms, exact_ms = 1e3 * statistics.mean(fast_times), 1e3 * statistics.mean(exact_times)
    yield Row("making and estimating a plan", fast_ms, "ms")
    yield Row("simulating a plan", exact_ms, "ms", "making and estimating", exact_ms / fast_ms)


def handicapped_node() -> Iterator[Row]:
    workload = Workload(tuple(Layer(f"l{i}", 2e11, 2e7, 1e6) for i in range(12)), 30)
    nodes = tuple(Node(f"n{i}", 1e13, 8e9) for i in range(15))
    bandwidth = np.full((16, 16), 1e8)
    latency = np.full((16, 16), 1e-3)
    alone = schedule(Cluster(nodes, latency[:15, :15], bandwidth[:15, :15]), workload).predicted.iteration_seconds
    behind = bandwidth.copy()
    behind[15, :] = behind[:, 15] = 1e6
    for name, node, links in (
        ("speed", Node("slow", 1e11, 8e9), bandwidth),
        ("bandwidth", Node("slow", 1e13, 8e9), behind),
    ):
        found = schedule(Cluster((*nodes, node), latency, links), workload).predicted.iteration_seconds
        yield Row(f"15 nodes and one with 1% of their {name}", found, "s per step", "the 15 nodes", found / alone)


def replayed(events: int, seeds: int) -> Iterator[Row]:
    """Medians over the seeds. The totals do not include planning."""
    outcomes = {name: [follow(answer, events, seed) for seed in range(1, seeds + 1)] for name, answer in WAYS.items()}
    ours = statistics.median(outcome.total for outcome in outcomes[next(iter(WAYS))])
    for name, found in outcomes.items():
        title = f"replay of {events} events, {name}"
        total = statistics.median(outcome.total for outcome in found)
        yield Row(f"{title}: training and moving", total, "s", next(iter(WAYS)), total / ours)
        for what, unit, values in (
            ("training", "s", [outcome.training for outcome in found]),
            ("moving", "s", [outcome.moving for outcome in found]),
            ("moved", "GB", [outcome.moved_bytes / 1e9 for outcome in found]),
            ("changes of plan", "", [float(outcome.changes) for outcome in found]),
            ("planning per event", "s", [outcome.planning / events for outcome in found]),
        ):
            yield Row(f"{title}: {what}", statistics.median(values), unit)


def scale(nodes: int, seconds: float) -> Iterator[Row]:
    """Plans from scratch, then with one node more, then with a node of the plan lost. Times are CPU seconds of this process."""
    cluster = regional_cluster(nodes + 1)
    workload = Workload(tuple(Layer(f"l{i}", 2e11, 1e8, 4e6) for i in range(24)), nodes // 2)
    plan: Plan | None = None
    everyone = list(range(nodes + 1))
    present = everyone[:-1]
    for name, limit in (("cold plan", seconds), ("one joins", seconds / 10), ("one leaves", seconds / 10)):
        if name == "one joins":
            present = everyone
        elif name == "one leaves":
            assert plan is not None
            present = [node for node in everyone if cluster.ids[node] != plan.stages[0].replicas[0]]
        now = part_of(cluster, present)
        began = time.process_time()
        plan = schedule(now, workload, plan, time_used=since(began, 0.6 * limit)).plan
        took = time.process_time() - began
        yield Row(f"{nodes} nodes, {name}, deadline {0.6 * limit:.1f} s", took, "s", f"{limit:g} s", took / limit)
        iteration = simulate(Problem(now, workload), draft_of(plan, now))
        yield Row(f"{nodes} nodes, {name}: seconds per step", iteration, "s")
    yield most_memory(2)


def most_memory(limit: float) -> Row:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    return Row("most memory so far", peak, "GiB", f"limit {limit:g} GiB", peak / limit)


def since(began: float, seconds: float) -> Callable[[], float]:
    """Tells the fraction of ``seconds`` that this process has computed since ``began``."""
    return lambda: (time.process_time() - began) / seconds


def rows(quick: bool, replays: int) -> Iterator[Row]:
    yield from estimate_against_simulation(4 if quick else 20)
    sizes = dict.fromkeys((4, 8), 2) if quick else dict.fromkeys(range(4, 9), 20)
    yield from small_clusters(sizes, 5)
    yield from handicapped_node()
    yield from replayed(10 if quick else 200, 1 if quick else replays)
    yield from scale(256 if quick else 1024, 10.0 if quick else 30.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="fewer seeds, clusters and events")
    parser.add_argument(
        "--replays", type=int, default=1, metavar="N", help="seeds of the replay; 1 takes some 4 minutes"
    )
    options = parser.parse_args()
    made = []
    for row in rows(options.quick, options.replays):
        print(f"{row.measure}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
        made.append(row)
    show("The scheduler", made, options.json)


if __name__ == "__main__":
    main()
