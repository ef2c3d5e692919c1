"""How much the certified bounds say: ``python -m tests.bench.bounds [--nodes 16 32 64 128] [--seeds 3] [--seconds 20] [--json]``.

For unequal clusters of data centers and homes: the bound, the time that it takes on one core, and how many times longer the plan
takes that the scheduler finds in ``--seconds`` (0: without a plan).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from dtfm.scheduler.cost.bounds import rising_bounds
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.schedule import schedule
from tests.bench.clusters import unequal
from tests.bench.rows import Row, show

UNLIMITED = 1_000_000


def certified(count: int, seed: int, seconds: float) -> Iterator[Row]:
    """The bound for one cluster of ``count`` nodes, compared with a plan that is searched for ``seconds``."""
    cluster, workload = unequal(seed, count)
    title = f"{count} unequal nodes, seed {seed}"
    began = time.process_time()
    bounds = list(rising_bounds(Problem(cluster, workload)))
    took = time.process_time() - began
    yield Row(f"{title}: certified bound", bounds[-1], "s per step", "devices alone", bounds[-1] / bounds[0])
    yield Row(f"{title}: time for the bound on one core", took, "s")
    if seconds > 0:
        until = time.process_time() + seconds
        plan = schedule(
            cluster,
            workload,
            seed=seed,
            evaluations=UNLIMITED,
            deadline=lambda: time.process_time() > until,
            tight_bound=False,
        )
        found = plan.predicted.iteration_seconds
        yield Row(f"{title}: plan found in {seconds:g} s", found, "s per step", "certified bound", found / bounds[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds for each plan; 0: no plans")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    made = []
    for count in options.nodes:
        for seed in range(options.seeds):
            for row in certified(count, seed, options.seconds):
                print(f"{row.measure}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
                made.append(row)
    show("Certified bounds", made, options.json)


if __name__ == "__main__":
    main()
