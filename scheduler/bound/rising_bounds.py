"""Lower bounds on the seconds per step of any plan.

Four arguments, each valid for any groups, cuts, loads, routes and order of stages; each next one takes longer and says more.

Devices share the work: work_bound.

A way through all stages: way.py. This says most with few micro-batches.

Each node with its own memory, connection and links: capacity.py counts what a node can complete in T seconds, node_prices.py
shows that the nodes do not suffice. This says most with many unequal nodes.

All groups of nodes, and which can be stages of one plan: small_cluster.py. This says most, and takes too long with many nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtfm.scheduler.bound.node_prices import ruled_out
from dtfm.scheduler.bound.small_cluster import LOOKS, ruled_out_by_partition
from dtfm.scheduler.bound.way import way_bound
from dtfm.scheduler.cost.bounds import work_bound
from dtfm.scheduler.model.problem import Problem

MOST_NODES = 256
"""Largest number of nodes for which more than work_bound is computed."""
STEPS = 100
"""Default number of changes of the nodes' prices, of either kind (node_prices.ruled_out)."""
ENTRIES_PER_NODE = 4e5
"""Default number of table entries that are priced, per node: about half a second for 16 nodes, three seconds for 128."""


def iteration_bound(problem: Problem, steps: int = STEPS, entries: float | None = None, looks: float = LOOKS) -> float:
    """Certified lower bound on the seconds per step of any feasible plan: the last of rising_bounds."""
    bound = 0.0
    for better in rising_bounds(problem, steps, entries, looks):
        bound = better
    return bound


def rising_bounds(
    problem: Problem, steps: int = STEPS, entries: float | None = None, looks: float = LOOKS
) -> Iterator[float]:
    """Certified lower bounds on the seconds per step of any feasible plan, each at least as good as the one before.

    One can stop at any time.

    The first takes no time. ``steps``, ``entries`` and ``looks`` limit the work; None means ENTRIES_PER_NODE.
    """
    bound = work_bound(problem.workload, problem.flops)
    yield bound
    if problem.cluster.copies > 1 or len(problem.flops) > MOST_NODES:
        return
    bound = max(bound, way_bound(problem))
    yield bound
    for seconds in ruled_out(
        problem, bound, steps, ENTRIES_PER_NODE * len(problem.flops) if entries is None else entries
    ):
        bound = max(bound, seconds * (1 - 1e-9))
        yield bound
    for seconds in ruled_out_by_partition(problem, bound, looks):
        yield max(bound, seconds * (1 - 1e-9))
