"""What each part of the evolutionary search brings: seconds per step without it over seconds with it.

    python -m tests.bench.ablation [--nodes 8 32 128] [--seconds 2 6 30] [--clusters 3] [--seeds 3] [--parts NAME ...] [--json]

For clusters.unequal. Every run has the same CPU time of this process, on one thread. A row is the median over all clusters and
seeds. Finding no plan counts as infinity. Where the whole search finds none, the cluster does not count.

The last rows lose a node of the plan (`a node lost`), lose two, or gain one (`a node joined`). They take the plan after a tenth
of the time, without the kept population and with it. They compare it with the plan that the whole time finds from the kept
population.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from random import Random
from unittest.mock import patch

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.population import Population
from dtfm.scheduler.model.problem import Ints, Problem
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search import anneal, crossover, population, search
from dtfm.scheduler.search.anneal import Found
from dtfm.scheduler.search.seed_groups import nearest_nodes
from dtfm.scheduler.warm_up import warm_up
from tests.bench.clusters import part_of, unequal
from tests.bench.rows import Row, show
from tests.bench.scheduler import since

NEVER = 10**9


def cloned(
    evaluator: Evaluator, members: Sequence[Found], number: int, keep_sizes: bool, rng: Random
) -> list[Candidate]:
    """In place of population.children: each child is the better of two members."""
    drawn = [members[min(rng.randrange(len(members)), rng.randrange(len(members)))] for _ in range(number)]
    return [evaluator.estimated(one.groups, one.cuts) for one in drawn]


def alone(found: Sequence[Found], nodes: int, most: int = 1) -> list[Found]:
    """In place of population.survivors: the best one."""
    return population.survivors(found, nodes, 1)


def in_any_order(problem: Problem) -> Ints:
    """In place of seed_groups.nearest_nodes: each node's others, shuffled."""
    return np.random.default_rng(0).permuted(nearest_nodes(problem), axis=1)


PARTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "crossover": lambda: patch.object(search, "children", cloned),
    "more than one survivor": lambda: patch.object(search, "survivors", alone),
    "survivors that differ": lambda: patch.object(population, "ALIKE", 1.0),
    "best walks in place of the worst": lambda: patch.object(anneal, "SELECTION", NEVER),
    "new generations, in place of a longer first one": lambda: patch.object(search, "FOUNDING", NEVER),
    "stages of both parents, half each": lambda: patch.object(crossover, "FROM_FATHER", 0.1),
    "near nodes, in place of any": lambda: patch.object(search, "nearest_nodes", in_any_order),
    "the exact search, of at most eight nodes": lambda: patch.object(search, "is_small", lambda _: False),
    "evenness of stages": lambda: patch.object(anneal, "EVENNESS", 0.0),
}


def planned(
    cluster: Cluster,
    workload: Workload,
    seconds: float,
    seed: int,
    before: Decision | None = None,
    kept: Population = (),
) -> Decision:
    used = since(time.process_time(), seconds)
    incumbent = None if before is None else before.plan
    return schedule(cluster, workload, incumbent, population=kept, seed=seed, time_used=used)


def without_parts(nodes: int, seconds: float, clusters: int, seeds: int, parts: Sequence[str]) -> Iterator[Row]:
    found: dict[str, list[float]] = {"": [], **{part: [] for part in parts}}
    for number in range(clusters):
        cluster, workload = unequal(number, nodes)
        for seed in range(seeds):
            for part, taken in found.items():  # by turns, as other work on the machine comes and goes
                with PARTS[part]() if part else nullcontext():
                    try:
                        step = planned(cluster, workload, seconds, seed).predicted.iteration_seconds
                    except Infeasible:
                        step = math.inf
                    taken.append(step)
    whole = found.pop("")
    if min(whole) == math.inf:
        return
    yield Row(f"{nodes} nodes, {seconds:g} s: seconds per step", statistics.median(whole), "s")
    for part, taken in found.items():
        ratios = [one / other for one, other in zip(taken, whole, strict=True) if other < math.inf]
        worse, better = sum(ratio > 1.01 for ratio in ratios), sum(ratio < 0.99 for ratio in ratios)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}; of {len(ratios)}, 1 % worse {worse}, better {better}"
        middle = statistics.median(ratios)
        yield Row(f"{nodes} nodes, {seconds:g} s, without: {part} ({spread})", middle, "x", "with it", middle)


def after_a_change(nodes: int, seconds: float, clusters: int, seeds: int) -> Iterator[Row]:
    """Plans after a loss and a join, from the kept population and without it."""
    early: dict[tuple[str, str], list[float]] = {}
    for number in range(clusters):
        cluster, workload = unequal(number, nodes)
        for seed in range(seeds):
            with suppress(Infeasible):  # too little memory, before the change or after it
                everyone = list(range(nodes))
                newcomer = Random(seed).randrange(nodes)
                fewer = part_of(cluster, [node for node in everyone if node != newcomer])
                before = planned(fewer, workload, seconds, seed)
                lost = before.plan.stages[seed % len(before.plan.stages)].replicas[0]
                left = part_of(fewer, [node for node, name in enumerate(fewer.ids) if name != lost])
                gone = {lost, before.plan.stages[(seed + 1) % len(before.plan.stages)].replicas[-1]}
                of_two = part_of(fewer, [node for node, name in enumerate(fewer.ids) if name not in gone])
                for change, now in (("a node lost", left), ("two nodes lost", of_two), ("a node joined", cluster)):
                    best = planned(now, workload, seconds, seed + 1, before, before.population)
                    for way, kept in (("with the kept population", before.population), ("without it", ())):
                        quick = planned(now, workload, seconds / 10, seed + 2, before, kept)
                        ratio = quick.predicted.iteration_seconds / best.predicted.iteration_seconds
                        early.setdefault((change, way), []).append(ratio)
    for (change, way), ratios in early.items():
        title = f"{nodes} nodes, {change}, {seconds / 10:g} s {way} ({min(ratios):.3f} to {max(ratios):.3f})"
        yield Row(title, statistics.median(ratios), "x", f"{seconds:g} s", statistics.median(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--seconds", type=float, nargs="+", default=[2, 6, 30], help="for each number of nodes")
    parser.add_argument("--clusters", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--no-change", action="store_true", help="without the rows of nodes that leave and join")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    warm_up()
    made: list[Row] = []
    for nodes, seconds in zip(options.nodes, options.seconds, strict=True):
        rows = list(without_parts(nodes, seconds, options.clusters, options.seeds, options.parts))
        if not options.no_change:
            rows += after_a_change(nodes, seconds, options.clusters, options.seeds)
        for row in rows:
            print(f"{row.measure}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
        made += rows
    show("What each part of the search brings", made, options.json)


if __name__ == "__main__":
    main()
