"""Compiles all functions that planning uses, or loads them from the cache, before anybody waits for a plan.

``python -m dtfm.scheduler.warm_up`` fills the cache for all later processes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

from dtfm.scheduler.bound.branch_and_bound import MOST_NODES
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.paper import plan_by_paper
from dtfm.scheduler.schedule import schedule

WALKED, SEARCHED_EXACTLY = 300, 2000
"""Plans to try for each cluster: enough that walks, selections and simulations all happen. Walks take several hundred at least.
The exact search of the small cluster gets the rest."""
PAPER_STAGES = 3
"""Groups of as many nodes for the paper's objective: the fewest whose order is searched."""
SEARCHED_IN_VAIN = 50
"""Plans to try for a cluster without room for any plan."""


@functools.cache
def warm_up() -> None:
    """Plans tiny clusters, from scratch and with an incumbent: first a cluster that is searched by walks, then one that is
    searched exactly. Then plans a cluster by the paper's objective, and a cluster that has no plan.

    Takes a fraction of a second when the cache holds the compiled code, and up to a minute otherwise. Only the first call of a
    process does anything.
    """
    workload = Workload(tuple(Layer(f"layer {index}", 1e11, 1e7, 1e6) for index in range(2)), 2)
    for count, evaluations in ((MOST_NODES + 1, WALKED), (2, SEARCHED_EXACTLY)):
        cluster = _alike(count)
        first = schedule(cluster, workload, evaluations=evaluations)
        schedule(cluster, workload, first.plan, evaluations=evaluations)
    longer = replace(workload, layers=workload.layers * PAPER_STAGES)
    plan_by_paper(_alike(PAPER_STAGES * PAPER_STAGES), longer, stages=PAPER_STAGES, evaluations=WALKED)
    any_way = replace(workload, checkpointing=None, optimizer_state=None)
    without_room = replace(cluster, nodes=tuple(replace(node, memory_bytes=1e6) for node in cluster.nodes))
    with contextlib.suppress(Infeasible):
        schedule(without_room, any_way, evaluations=SEARCHED_IN_VAIN)


def _alike(count: int) -> Cluster:
    nodes = tuple(Node(f"node {index}", 1e12, 1e10) for index in range(count))
    return Cluster(nodes, np.full((count, count), 1e-3), np.full((count, count), 1e8))


def is_compiled() -> bool:
    """Whether the cache holds all compiled functions for this machine's processor, so that `warm_up` has nothing to compile."""
    processor = cpu_target.target_context.codegen().magic_tuple()
    return all(any(key[1] == processor for key in _cached(function)) for function in compiled_functions())


def compiled_functions() -> list[Any]:
    """The scheduler's functions that Numba compiles, as Numba's dispatchers."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("dtfm.scheduler.")]
    return list(
        {
            id(each): each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)
        }.values()
    )


def _cached(function: Any) -> Any:
    """The keys under which the cache holds the function: argument types, processor, and code."""
    return function._cache._cache_file._load_index()


if __name__ == "__main__":
    began = time.monotonic()
    warm_up()
    print(f"The scheduler is compiled ({time.monotonic() - began:.0f} s).")
