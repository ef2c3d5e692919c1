"""The paper's tables again (arXiv 2206.01288): ``python -m tests.bench.paper [--json] [--quick] [--only networks|steps]``.

First its five networks, by its cost model: 64 nodes in 8 groups of 8, shuffled. Random placement; the published scheduler,
written again in published.py; ours; and the bound, below which nothing is possible. Then GPT-3 1.3B over the worldwide network:
the seconds that a step of our plan should take, in 8 groups of 8 and free, beside what the paper's authors measured. Seconds of
search are CPU seconds of this process, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from dtfm.scheduler.cost.paper import paper_seconds
from dtfm.scheduler.formats.paper import COSTS, Network, paper_network, paper_workload
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.paper import plan_by_paper
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.warm_up import warm_up
from tests.bench.clusters import shuffled
from tests.bench.published import CHILDREN, PARENTS, published_cost
from tests.bench.rows import Row, show

DEADLINE, STEP_DEADLINE = 3.0, 10.0
"""CPU seconds of each search, by the paper's objective and for steps."""
RANDOM = 101
"""Random placements; their median counts."""
MEASURED = {
    (24, 1024): 43.8,
    (24, 2048): 62.3,
    (24, 4096): 104.1,
    (40, 1024): 58.2,
    (40, 2048): 80.7,
    (40, 4096): 124.1,
}
"""Seconds of a step over the worldwide network that the paper's authors measured, by layers and samples."""


def networks(seeds: int) -> Iterator[Row]:
    workload = paper_workload()
    for network in Network:
        found, after, bound = list[float](), list[float](), 0.0
        for seed in range(seeds):
            began = time.process_time()
            reached = [0.0]

            def improved(_evaluations: int, _cost: float, began: float = began, reached: list[float] = reached) -> None:
                reached[0] = time.process_time() - began

            nodes, used = shuffled(paper_network(network), seed), since(began, DEADLINE)
            decision = plan_by_paper(nodes, workload, seed=seed, time_used=used, improved=improved)
            assert decision.predicted.paper is not None
            found.append(decision.predicted.paper.total)
            after.append(reached[0])
            bound = decision.lower_bound_seconds
        best, longest = statistics.median(found), max(after)
        exchanges = [
            Problem(shuffled(paper_network(network), seed), workload).paper_exchanges() for seed in range(seeds)
        ]
        at_random = statistics.median(random_costs(exchanges[0]))
        yield Row(f"{network}: random placement, median of {RANDOM}", at_random, "s", "ours", at_random / best)
        published_cost(exchanges[0], COSTS.stages, 2, 1, 0)  # compiles
        began = time.process_time()
        published = [published_cost(each, COSTS.stages, PARENTS, CHILDREN, seed) for seed, each in enumerate(exchanges)]
        took = (time.process_time() - began) / seeds
        middle = statistics.median(published)
        yield Row(f"{network}: published scheduler, median", middle, "s", "ours", middle / best)
        yield Row(f"{network}: published scheduler, worst", max(published), "s", "ours", max(published) / best)
        yield Row(f"{network}: ours, median", best, "s", "the bound", best / bound)
        yield Row(f"{network}: ours, worst", max(found), "s", "the bound", max(found) / bound)
        yield Row(f"{network}: bound", bound, "s", "ours", bound / best)
        yield Row(f"{network}: published scheduler, CPU time", took, "s", "ours", took / longest)
        yield Row(f"{network}: ours, CPU time until found, longest", longest, "s", "goal 3 s", longest / 3)


def random_costs(exchanges: np.ndarray) -> Iterator[float]:
    """The costs of random groups in random order. Senders are matched with receivers as the cost model says."""
    for seed in range(RANDOM):
        order = np.random.default_rng(seed).permutation(exchanges.shape[1]).tolist()
        groups = tuple(tuple(sorted(order[8 * group : 8 * group + 8])) for group in range(8))
        yield paper_seconds(exchanges, groups).total


def steps(layers: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[Row]:
    cluster = shuffled(paper_network(Network.WORLDWIDE), 0)
    for count in layers:
        for batch in batches:
            workload = paper_workload(count, batch)
            measured = MEASURED.get((count, batch))
            against = "" if measured is None else f"measured {measured:g} s"
            for name, stages in (("8 stages of 8", (8,) * 8), ("free", None)):
                began = time.process_time()
                decision = schedule(cluster, workload, stages=stages, time_used=since(began, STEP_DEADLINE))
                seconds = decision.predicted.iteration_seconds
                if stages is None:
                    name += f" ({len(decision.plan.stages)} stages, {len(decision.plan.idle)} nodes idle)"
                ratio = None if measured is None else seconds / measured
                yield Row(f"{count} layers, batch {batch:,}: step predicted, {name}", seconds, "s", against, ratio)


def since(began: float, seconds: float) -> Callable[[], float]:
    """Tells the fraction of ``seconds`` that this process has computed since ``began``."""
    return lambda: (time.process_time() - began) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="one seed, and 24 layers with 1,024 samples alone")
    parser.add_argument("--only", choices=("networks", "steps"), help="one of the two tables")
    options = parser.parse_args()
    warm_up()
    made = []

    def rows() -> Iterator[Row]:
        if options.only != "steps":
            yield from networks(1 if options.quick else 5)
        if options.only != "networks":
            yield from steps((24,), (1024,)) if options.quick else steps((24, 32, 40), (1024, 2048, 4096))

    for row in rows():
        print(f"{row.measure}: {row.value:.4f} {row.unit}", file=sys.stderr, flush=True)
        made.append(row)
    show("The paper, reproduced", made, options.json)


if __name__ == "__main__":
    main()
