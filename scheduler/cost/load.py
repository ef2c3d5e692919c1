"""The number of micro-batches that each replica of a stage computes in a step: its load."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Ints, Problem
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables


@compiled
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


@compiled
def _pace(t: Tables, sketch: Sketch, stages: int, stage: int, node: int, into: float, out_of: float) -> float:
    """Seconds per micro-batch of a node of ``stage``: of its device, its connection, and its links to each side together.

    ``into`` and ``out_of`` are the bytes of the activations that it receives and sends.
    """
    pace = 3 * sketch.node[node].forward
    sent, received = 0.0, 0.0
    for side in (-1, 1):
        other = stage + side
        size = into if side < 0 else out_of
        if other < 0 or other >= stages:
            continue
        there, back, ratio_there, ratio_back = 0.0, 0.0, 0.0, 0.0
        for at in range(sketch.stage[other].first, sketch.stage[other + 1].first):
            peer = sketch.members[at]
            there += t.link[node, peer].speed
            back += t.link[node, peer].speed_back
            ratio_there += t.link[node, peer].ratio
            ratio_back += t.link[node, peer].ratio_back
        if there == 0.0 or back == 0.0:
            return np.inf
        pace = max(pace, size / there, size / back)
        peers = sketch.stage[other + 1].first - sketch.stage[other].first
        sent += size * ratio_there / peers
        received += size * ratio_back / peers
    return float(max(pace, sent * t.node[node].per_up, received * t.node[node].per_down))


@compiled
def share_out(t: Tables, sketch: Sketch, stages: int, cuts: Ints, limit: float, evenness: float) -> float:
    """Fills in forward, pace and load, and returns the seconds that the busiest node is busy.

    Infinite when a stage has no links to its neighbours. Gives up, with a number above ``limit``, as soon as the busiest node's
    seconds, plus twice ``evenness`` times the mean over stages of such seconds, exceed it.
    """
    longest, level = 0.0, 0.0
    for stage in range(stages):
        work = t.layer[cuts[stage + 1]].flops_before - t.layer[cuts[stage]].flops_before
        into = t.layer[cuts[stage] - 1].activation if stage > 0 else 0.0
        out_of = t.layer[cuts[stage + 1] - 1].activation if stage < stages - 1 else 0.0
        members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
        paces, loads = sketch.shards[0][: len(members)], sketch.taken[: len(members)]
        for at, node in enumerate(members):
            sketch.node[node].forward = work / t.node[node].flops
            paces[at] = sketch.node[node].pace = _pace(t, sketch, stages, stage, node, into, out_of)
        if not balance(paces, t.micro_batches, loads):
            return np.inf
        slowest = 0.0
        for at, node in enumerate(members):
            sketch.node[node].load = loads[at]
            if loads[at]:
                slowest = max(slowest, loads[at] * paces[at])
        longest = max(longest, slowest)
        level += slowest / stages
        if longest + 2 * evenness * level > limit:
            return longest + 2 * evenness * level
    return float(longest)


def loads_by_speed(problem: Problem, group: Ints) -> Ints:
    """The loads with which the replicas compute for as short a time as possible, links left out: int64 [len(group)]."""
    loads = np.zeros(len(group), dtype=np.int64)
    balance(1.0 / problem.flops[group], problem.workload.micro_batches, loads)
    return loads
