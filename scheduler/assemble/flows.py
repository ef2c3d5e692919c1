"""Flows: how many micro-batches go from each node of a stage to each node of the next."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables

TURNS = 20
"""Number of times that links may become busier before any link may carry anything."""
BUSIER = 1.2
"""Factor by which they may, each time."""
MANY = 2_048
"""Number of pairs of nodes above which the cheapest are dealt with first, SHARE times as many as there are nodes."""
SHARE = 8
SAMPLE = 1_024
"""Number of pairs from which the price of these is guessed."""


@compiled
def connect(t: Tables, sketch: Sketch, stages: int, cuts: Ints, longest: float) -> int:
    """Fills in the flows, and returns the number of links that they need and that do not exist.

    A transport problem at each boundary: the pairs of nodes with the shortest exchanges come first. A link carries only as much
    as it can in ``longest`` seconds, the time for which the busiest node is busy anyway. What is then left finds its way by
    moving other micro-batches (augmenting paths: Ford and Fulkerson 1956). When that does not suffice for all, links may be
    busy BUSIER times as long, and so on.
    """
    edges, missing = 0, 0
    for stage in range(stages - 1):
        sketch.stage[stage].begin = edges
        size = t.layer[cuts[stage + 1] - 1].activation
        _fill(t, sketch, stage, size, longest)
        before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
        pair = 0
        for row in range(before, middle):
            for column in range(middle, after):
                if sketch.taken[pair] > 0:
                    a, b = sketch.members[row], sketch.members[column]
                    if np.isinf(t.link[a, b].slowness) or np.isinf(t.link[b, a].slowness):
                        missing += 1
                    sketch.edge[edges].sender = a
                    sketch.edge[edges].receiver = b
                    sketch.edge[edges].count = sketch.taken[pair]
                    edges += 1
                pair += 1
    sketch.stage[stages - 1].begin = edges
    return missing


@compiled
def _fill(t: Tables, sketch: Sketch, stage: int, size: float, longest: float) -> None:
    """Fills in ``taken`` [senders * receivers] for the boundary after ``stage``; ``size`` is in bytes per micro-batch."""
    before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
    columns = after - middle
    taken, cost, node = sketch.taken, sketch.cost, sketch.node
    pairs = 0
    for row in range(before, middle):
        a = sketch.members[row]
        node[a].left = sketch.node[a].load
        for column in range(middle, after):
            b = sketch.members[column]
            node[b].left = sketch.node[b].load
            if columns == 1 or middle - before == 1:
                taken[pairs] = min(sketch.node[a].load, sketch.node[b].load)
            else:
                taken[pairs] = 0
                cost[pairs] = (
                    t.link[a, b].latency + t.link[b, a].latency + size * (t.link[a, b].slowness + t.link[b, a].slowness)
                )
            pairs += 1
    if columns == 1 or middle - before == 1:
        return
    rest, seconds = t.micro_batches, longest * (1 + 1e-9)
    if pairs > MANY:
        order = _cheapest(cost[:pairs], SHARE * (columns + middle - before))
        rest = _take(t, sketch, stage, size, order, seconds, rest)
    rest = _take(t, sketch, stage, size, _open_pairs(sketch, stage, cost), seconds, rest)
    for turn in range(TURNS + 1):
        if rest == 0:
            return
        rest = _reroute(t, sketch, stage, size, seconds if turn < TURNS else np.inf, rest)
        seconds *= BUSIER


@compiled
def _take(t: Tables, sketch: Sketch, stage: int, size: float, order: Ints, seconds: float, rest: int) -> int:
    """Gives pairs, in this order, what a link carries in ``seconds``. Returns the micro-batches that are left of ``rest``."""
    before, middle = sketch.stage[stage].first, sketch.stage[stage + 1].first
    columns = sketch.stage[stage + 2].first - middle
    node = sketch.node
    for pair in order:
        a, b = sketch.members[before + pair // columns], sketch.members[middle + pair % columns]
        number = min(node[a].left, node[b].left)
        if number > 0:
            number = min(number, _carried(t, a, b, size, seconds) - sketch.taken[pair])
        if number <= 0:
            continue
        sketch.taken[pair] += number
        node[a].left -= number
        node[b].left -= number
        rest -= number
        if rest == 0:
            break
    return rest


@compiled
def _carried(t: Tables, a: int, b: int, size: float, seconds: float) -> int:
    """The micro-batches that go from node a to node b, and their gradients back, in ``seconds``."""
    if size == 0 or seconds == np.inf:
        return t.micro_batches
    return int(min(seconds / (size * max(t.link[a, b].slowness, t.link[b, a].slowness)), 1e15))


@compiled
def _reroute(t: Tables, sketch: Sketch, stage: int, size: float, seconds: float, rest: int) -> int:
    """Sends what is left along shortest augmenting paths, with links that are busy for ``seconds``. Returns what remains left."""
    before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
    rows, columns, node = middle - before, after - middle, sketch.node
    senders, receivers = sketch.members[before:middle], sketch.members[middle:after]
    to_row, to_column, reached = np.empty(rows, np.int64), np.empty(columns, np.int64), np.empty(rows, np.int64)
    while rest > 0:
        # Breadth first: from senders with something left to a receiver with something left.
        to_row[:], to_column[:] = -2, -1
        count, at, end = 0, 0, -1
        for row in range(rows):
            if node[senders[row]].left > 0:
                to_row[row] = -1
                reached[count] = row
                count += 1
        while at < count and end < 0:
            row = reached[at]
            at += 1
            for column in range(columns):
                a, b, pair = senders[row], receivers[column], row * columns + column
                if to_column[column] >= 0 or sketch.taken[pair] >= _carried(t, a, b, size, seconds):
                    continue
                to_column[column] = row
                if node[b].left > 0:
                    end = column
                    break
                for other in range(rows):
                    if to_row[other] == -2 and sketch.taken[other * columns + column] > 0:
                        to_row[other] = column
                        reached[count] = other
                        count += 1
        if end < 0:
            return rest
        number, column = node[receivers[end]].left, end
        while column >= 0:
            row = to_column[column]
            room = _carried(t, senders[row], receivers[column], size, seconds) - sketch.taken[row * columns + column]
            number, column = min(number, room), to_row[row]
            number = min(number, sketch.taken[row * columns + column] if column >= 0 else node[senders[row]].left)
        column = end
        while column >= 0:
            row = to_column[column]
            sketch.taken[row * columns + column] += number
            column = to_row[row]
            if column >= 0:
                sketch.taken[row * columns + column] -= number
        node[senders[row]].left -= number
        node[receivers[end]].left -= number
        rest -= number
    return rest


@compiled
def _cheapest(cost: Floats, number: int) -> Ints:
    """About as many of the cheapest pairs, the cheapest first: sorting all would take most of the time."""
    step = max(1, len(cost) // SAMPLE)
    sample = np.sort(cost[::step])
    most = sample[min(len(sample) - 1, number * len(sample) // len(cost))]
    chosen = np.flatnonzero(cost <= most)
    return chosen[np.argsort(cost[chosen])]


@compiled
def _open_pairs(sketch: Sketch, stage: int, cost: Floats) -> Ints:
    """The pairs of nodes that both have micro-batches left, the cheapest first."""
    before, middle, after = sketch.stage[stage].first, sketch.stage[stage + 1].first, sketch.stage[stage + 2].first
    node, columns, count = sketch.node, after - middle, 0
    pairs = np.empty((middle - before) * columns, np.int64)
    for row in range(middle - before):
        if node[sketch.members[before + row]].left > 0:
            for column in range(columns):
                if node[sketch.members[middle + column]].left > 0:
                    pairs[count] = row * columns + column
                    count += 1
    pairs = pairs[:count]
    return pairs[np.argsort(cost[pairs])]
