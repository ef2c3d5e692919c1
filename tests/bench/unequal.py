"""Plans for unequal clusters of data centers and homes (clusters.unequal), with devices 40 times apart.

    python -m tests.bench.unequal [--nodes 16 32 64 128] [--clusters 3] [--seeds 3] [--seconds 30] [--long 0] [--pairs 0]
    [--json]

For each cluster: how far the plans of several seeds are apart after ``--seconds`` on one core, how much worse they are after a
tenth of that, and how far above the certified bound. With ``--long``, also how far above the plans of a search of that many
seconds on all cores. With ``--pairs``, plans for all nodes against plans for a random subset of them. The first row tells how
many steps a walk takes per second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from random import Random

import numpy as np

from dtfm.scheduler.bound.stage_bounds import work_bound
from dtfm.scheduler.cost.state_transfer import nothing_to_fetch
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.sketch import empty_sketch, position_of
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.moves import Rules
from dtfm.scheduler.search.seed_groups import nearest_nodes
from dtfm.scheduler.search.walk import ESTIMATE, walk
from dtfm.scheduler.warm_up import warm_up
from tests.bench.clusters import part_of, unequal
from tests.bench.rows import Row, show


def seconds_per_step(cluster: Cluster, workload: Workload, seconds: float, seed: int = 0, threads: int = 1) -> float:
    """The seconds per step of the plan that a search finds in ``seconds``: of this process's CPU with one thread, otherwise by
    the clock."""
    clock = time.process_time if threads == 1 else time.monotonic
    began = clock()
    found = schedule(cluster, workload, seed=seed, threads=threads, time_used=lambda: (clock() - began) / seconds)
    return found.predicted.iteration_seconds


def one_cluster(count: int, number: int, seeds: int, seconds: float, long: float) -> Iterator[Row]:
    """The rows for one cluster of ``count`` nodes."""
    cluster, workload = unequal(number, count)
    title = f"{count} unequal nodes, cluster {number}"
    bound = work_bound(Problem(cluster, workload))
    plans = [seconds_per_step(cluster, workload, seconds, seed) for seed in range(seeds)]
    early = [seconds_per_step(cluster, workload, seconds / 10, seed) for seed in range(seeds)]
    best = min(*plans, *early)
    if long > 0:
        best = min(best, seconds_per_step(cluster, workload, long, seeds, os.cpu_count() or 1))
    yield Row(
        f"{title}: worst of {seeds} seeds in {seconds:g} s", max(plans), "s per step", "the best", max(plans) / best
    )
    middle = statistics.median(early)
    yield Row(f"{title}: median in {seconds / 10:g} s", middle, "s per step", "the best", middle / best)
    yield Row(f"{title}: the best", best, "s per step", "the certified bound", best / bound)


def subsets(count: int, pairs: int, seconds: float) -> Iterator[Row]:
    """The plan for all nodes against the plan for a random subset, with the same budget."""
    ratios = []
    for number in range(pairs):
        cluster, workload = unequal(number, count)
        rng = Random(number)
        chosen = sorted(rng.sample(range(count), rng.randint(count // 2, count - 1)))
        try:
            fewer = seconds_per_step(part_of(cluster, chosen), workload, seconds)
        except Infeasible:
            continue
        ratios.append(seconds_per_step(cluster, workload, seconds) / fewer)
    title = f"{count} unequal nodes against a subset of them, {len(ratios)} pairs"
    yield Row(f"{title}: worst", max(ratios), "x", "limit 1.01", max(ratios) / 1.01)
    worse = sum(ratio > 1.01 for ratio in ratios)
    yield Row(f"{title}: more than 1 % slower", worse, "pairs", "all", worse / len(ratios))


def estimates_per_second(count: int) -> Row:
    """Steps of a walk near a good plan, on one core."""
    cluster, workload = unequal(0, count)
    problem = Problem(cluster, workload)
    began = time.process_time()
    plan = schedule(cluster, workload, time_used=lambda: (time.process_time() - began) / 3).plan
    groups = tuple(tuple(cluster.ids.index(node) for node in stage.replicas) for stage in plan.stages)
    here, best = (position_of(groups, (0, *(stage.layers[1] for stage in plan.stages)), count) for _ in range(2))
    layers, steps = len(workload.layers), 20_000
    rules = Rules(nearest_nodes(problem), min(count, layers), True, True, nothing_to_fetch(count, layers))
    began = time.process_time()
    walk(
        tables(problem),
        rules,
        here,
        best,
        empty_sketch(tables(problem)),
        ESTIMATE,
        0.002,
        0.0,
        steps,
        0,
        np.full(2, np.inf),
    )
    rate = steps / (time.process_time() - began)
    asked = {16: 20_000, 128: 2_000}.get(count)
    title = f"estimates per second at {count} unequal nodes"
    return Row(title, rate, "", f"goal {asked}", rate / asked) if asked else Row(title, rate, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--clusters", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of one core for each plan")
    parser.add_argument("--long", type=float, default=0.0, help="seconds of all cores for the plan to compare with")
    parser.add_argument(
        "--pairs", type=int, default=0, help="pairs of a cluster and a subset of it, by number of nodes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    warm_up()
    made = []
    for count in options.nodes:
        rows = [estimates_per_second(count)]
        for number in range(options.clusters):
            rows += one_cluster(count, number, options.seeds, options.seconds, options.long)
            for row in rows:
                print(f"{row.measure}: {row.value:.4g} {row.unit} ({row.ratio})", file=sys.stderr, flush=True)
            made += rows
            rows = []
        if options.pairs:
            made += subsets(count, options.pairs, options.seconds / 10)
    show("Unequal clusters", made, options.json)


if __name__ == "__main__":
    main()
