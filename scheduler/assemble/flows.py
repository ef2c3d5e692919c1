"""Flows: how many micro-batches go from each node of a stage to each node of the next."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.assemble.augment import augment, room
from dtfm.scheduler.cost.pace import FREE
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Floats, Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables

MORE = 1.002
"""Least factor by which devices and links may be busy longer when not everything fits."""
MANY = 2_048
"""With more pairs of nodes than this, the cheapest pairs come first: SHARE times as many pairs as there are nodes."""
SHARE = 8
SAMPLE = 1_024
"""Number of pairs to sample in order to guess the price of these cheapest pairs."""


@entry()
def connect(t: Tables, sketch: Sketch, stages: int, cuts: Ints, longest: float) -> bool:
    """Fills in the flows, and changes loads where links demand it. Returns False if there are too few links.

    This is a maximum flow through all stages. In ``longest`` seconds a node carries as many micro-batches as it computes, and a
    link as many as it transfers. Boundaries are dealt with one after the other. First, micro-batches flow under the given
    loads, and links with short exchanges come first. The micro-batches that are left find their way by moving others, here and
    in the stages before (augmenting paths: Ford and Fulkerson 1956). When no micro-batch can be moved, the full nodes and links
    tell how many seconds are needed at least (Newton's method for parametric flows: Radzik 1993). The search for paths goes on
    with that time.
    """
    pairs, seconds = 0, longest * (1 + 1e-9)
    for stage in range(stages - 1):
        size = t.layer[cuts[stage + 1] - 1].activation
        sketch.stage[stage].pairs = pairs
        pairs = _open(t, sketch, stage, size)
        rest = _take(sketch, stage, _in_order(t, sketch, stage, size), seconds)
        if rest > 0:
            rest, _, _ = augment(sketch, stage, seconds, rest, True)
        while rest > 0:
            rest, rate, soonest = augment(sketch, stage, seconds, rest, False)
            if rest > 0 and rate == 0.0:
                return False
            if rest > 0:
                seconds = max(seconds * MORE, t.micro_batches / rate, soonest)
    edges = 0
    for stage in range(stages - 1):
        sketch.stage[stage].begin = edges
        pair = sketch.stage[stage].pairs
        before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
        for row in range(before, middle):
            for column in range(middle, after):
                if sketch.taken[pair] > 0:
                    sketch.edge[edges].sender = sketch.members[row]
                    sketch.edge[edges].receiver = sketch.members[column]
                    sketch.edge[edges].count = sketch.taken[pair]
                    edges += 1
                pair += 1
    sketch.stage[stages - 1].begin = edges
    return True


@compiled()
def _open(t: Tables, sketch: Sketch, stage: int, size: float) -> int:
    """Prepares the boundary after ``stage``: nothing is sent, senders have their loads left to give, receivers theirs to take.

    Returns the number of pairs of nodes up to here.
    """
    before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
    node, pair = sketch.node, sketch.stage[stage].pairs
    for column in range(middle, after):
        b = sketch.members[column]
        node[b].left, node[b].load = sketch.node[b].load, 0
    for row in range(before, middle):
        a = sketch.members[row]
        node[a].left = sketch.node[a].load
        for column in range(middle, after):
            b = sketch.members[column]
            sketch.taken[pair] = 0
            slowness = t.slower[a, b]
            sketch.each[pair] = np.inf if np.isinf(slowness) else FREE * size * slowness
            pair += 1
    return int(pair)


@compiled()
def _take(sketch: Sketch, stage: int, order: Ints, seconds: float) -> int:
    """Gives pairs, in this order, what a link carries in ``seconds``. Returns the micro-batches that are left."""
    before, middle = sketch.stage[stage].first, sketch.stage[stage + 1].first
    columns, begin = sketch.stage[stage + 2].first - middle, sketch.stage[stage].pairs
    node, rest = sketch.node, 0
    for row in range(before, middle):
        rest += node[sketch.members[row]].left
    for pair in order:
        a, b = sketch.members[before + pair // columns], sketch.members[middle + pair % columns]
        number = min(node[a].left, node[b].left)
        if number > 0:
            number = min(number, room(0, sketch.each[begin + pair], seconds))
        if number <= 0:
            continue
        sketch.taken[begin + pair] += number
        node[a].left -= number
        node[b].left -= number
        node[b].load += number
        rest -= number
        if rest == 0:
            break
    return rest


@compiled(makes_arrays=True)
def _in_order(t: Tables, sketch: Sketch, stage: int, size: float) -> Ints:
    """The pairs of nodes, the shortest exchange first; of very many only the shortest."""
    before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
    rows, columns = middle - before, after - middle
    cost = np.empty(rows * columns)
    for pair in range(len(cost)):
        a, b = sketch.members[before + pair // columns], sketch.members[middle + pair % columns]
        cost[pair] = t.link[a, b].latency + t.link[b, a].latency
        if size > 0:
            cost[pair] += size * (t.link[a, b].slowness + t.link[b, a].slowness)
    if len(cost) > MANY:
        return _cheapest(cost, SHARE * (rows + columns))
    return np.argsort(cost)


@compiled(makes_arrays=True)
def _cheapest(cost: Floats, number: int) -> Ints:
    """About as many of the cheapest pairs, the cheapest first: sorting all would take most of the time."""
    step = max(1, len(cost) // SAMPLE)
    sample = np.sort(cost[::step])
    most = sample[min(len(sample) - 1, number * len(sample) // len(cost))]
    chosen = np.flatnonzero(cost <= most)
    return chosen[np.argsort(cost[chosen])]
