"""The number of micro-batches that each replica of a stage computes in a step: its load."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import entry
from dtfm.scheduler.model.problem import Floats, Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables


@entry()
def balance(pace: Floats, total: int, load: Ints) -> bool:
    """Divides ``total`` micro-batches so that the last node is done as early as possible.

    ``pace`` is float64 [nodes], seconds per micro-batch; an infinite pace gets none. ``load`` is int64 [nodes] and is filled.
    Of equally good nodes the first comes first. Returns False when every pace is infinite.
    """
    rate = 0.0
    for node in range(len(pace)):
        load[node] = 0
        rate += 1.0 / max(pace[node], 1e-30)
    if rate == 0.0:
        return False
    given = 0
    for node in range(len(pace)):
        load[node] = np.int64(total / (rate * max(pace[node], 1e-30)) * (1 - 1e-12))
        given += load[node]
    while given < total:
        best, at = np.inf, -1
        for node in range(len(pace)):
            done = (load[node] + 1) * pace[node]
            if done < best:
                best, at = done, node
        load[at] += 1
        given += 1
    return True


@entry()
def share_out(t: Tables, sketch: Sketch, stages: int) -> float:
    """Fills in the loads, given the paces, and returns the seconds that the busiest node is busy.

    Infinite when no node of a stage has a finite pace.
    """
    longest = 0.0
    for stage in range(stages):
        members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
        paces, loads = sketch.shards[0][: len(members)], sketch.taken[: len(members)]
        for at, node in enumerate(members):
            paces[at] = sketch.node[node].pace
        if not balance(paces, t.micro_batches, loads):
            return np.inf
        for at, node in enumerate(members):
            sketch.node[node].load = loads[at]
            if loads[at]:
                longest = max(longest, loads[at] * paces[at])
    return float(longest)
