"""Augmenting paths: more micro-batches through all stages by moving others (Ford and Fulkerson 1956)."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Sketch


@compiled()
def room(number: int, each: float, seconds: float) -> int:
    """How many more micro-batches fit into these seconds, beside ``number``, when one takes ``each`` seconds."""
    if each * (number + 1) > seconds:
        return 0
    return int(min(seconds / max(each, 1e-30), 1e15)) - number


@compiled(makes_arrays=True)
def augment(sketch: Sketch, stage: int, seconds: float, rest: int, balanced: bool) -> tuple[int, float, float]:
    """Sends what the senders before the boundary after ``stage`` have left along shortest augmenting paths.

    With ``balanced`` the paths end only at receivers that have something left to take. Returns three numbers: the micro-batches
    that remain left; the micro-batches per second that pass through the nodes and links which are busy for all of ``seconds``;
    and the seconds after which one more passes.
    """
    count = sketch.stage[stage + 2].first
    origin, queue, stage_of = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64), np.empty(count, np.int64)
    for s in range(stage + 2):
        stage_of[sketch.stage[s].first : sketch.stage[s + 1].first] = s
    while rest > 0:
        end = _way(sketch, stage, seconds, balanced, origin, queue, stage_of)
        if end < 0:
            rate, soonest = (0.0, np.inf) if balanced else _rate(sketch, stage, origin, stage_of)
            return rest, rate, soonest
        rest -= _send(sketch, origin, stage_of, end, seconds, balanced)
    return rest, 0.0, np.inf


@compiled()
def _way(sketch: Sketch, stage: int, seconds: float, balanced: bool, origin: Ints, queue: Ints, stage_of: Ints) -> int:
    """Returns a receiver that a sender with something left can reach, or -1 if there is none. Searches breadth first.

    A way leads through doors: door 2 m is before member m, door 2 m + 1 behind it. Fills in ``origin``: for each door the door
    before it on the way, -1 where the way begins, and -2 where the search did not get.
    """
    node, members, first, taken, each = sketch.node, sketch.members, sketch.stage, sketch.taken, sketch.each
    origin[:] = -2
    at, size = 0, 0
    for m in range(first[stage].first, first[stage + 1].first):
        if node[members[m]].left > 0:
            size = _reach(origin, queue, size, 2 * m + 1, -1)
    while at < size:
        door = queue[at]
        at += 1
        m = door // 2
        s = stage_of[m]
        if door % 2:  # on to the next stage, or fewer through m
            for b in range(first[s + 1].first, first[s + 2].first):
                pair = _pair(sketch, s, m, b)
                if origin[2 * b] == -2 and room(taken[pair], each[pair], seconds) > 0:
                    size = _reach(origin, queue, size, 2 * b, door)
                    if s == stage and _takes(sketch, members[b], seconds, balanced) > 0:
                        return b
            if node[members[m]].load > 0:
                size = _reach(origin, queue, size, 2 * m, door)
            continue
        if s <= stage and room(node[members[m]].load, node[members[m]].alone, seconds) > 0:
            size = _reach(origin, queue, size, 2 * m + 1, door)
        if s == 0:  # more at another node where the step begins
            for other in range(first[1].first):
                size = _reach(origin, queue, size, 2 * other, door)
        else:  # fewer from a node that sends to m
            for a in range(first[s - 1].first, first[s].first):
                if taken[_pair(sketch, s - 1, a, m)] > 0:
                    size = _reach(origin, queue, size, 2 * a + 1, door)
    return -1


@compiled()
def _reach(origin: Ints, queue: Ints, size: int, door: int, before: int) -> int:
    """Puts a door that was not reached yet at the end of the queue, and returns the queue's length."""
    if origin[door] != -2:
        return size
    origin[door], queue[size] = before, door
    return size + 1


@compiled()
def _pair(sketch: Sketch, stage: int, sender: int, receiver: int) -> int:
    """Where the pair of these two members is in ``taken`` and ``each``."""
    middle = sketch.stage[stage + 1].first
    columns = sketch.stage[stage + 2].first - middle
    return int(sketch.stage[stage].pairs + (sender - sketch.stage[stage].first) * columns + receiver - middle)


@compiled()
def _takes(sketch: Sketch, node: int, seconds: float, balanced: bool) -> int:
    """The number of micro-batches that this receiver may still take."""
    if balanced:
        return int(sketch.node[node].left)
    return room(sketch.node[node].load, sketch.node[node].alone, seconds)


@compiled()
def _send(sketch: Sketch, origin: Ints, stage_of: Ints, end: int, seconds: float, balanced: bool) -> int:
    """Moves as many micro-batches as possible along the way that ends before member ``end``, and returns their number."""
    node, members, taken = sketch.node, sketch.members, sketch.taken
    number, door = _takes(sketch, members[end], seconds, balanced), 2 * end
    while origin[door] >= 0:
        before = origin[door]
        m, a = door // 2, before // 2
        if m == a:
            if door % 2:
                number = min(number, room(node[members[m]].load, node[members[m]].alone, seconds))
            else:
                number = min(number, node[members[m]].load)
        elif stage_of[m] > stage_of[a]:
            pair = _pair(sketch, stage_of[a], a, m)
            number = min(number, room(taken[pair], sketch.each[pair], seconds))
        elif stage_of[m] < stage_of[a]:
            number = min(number, taken[_pair(sketch, stage_of[m], m, a)])
        door = before
    number = min(number, node[members[door // 2]].left)
    node[members[door // 2]].left -= number
    node[members[end]].load += number
    node[members[end]].left -= number
    door = 2 * end
    while origin[door] >= 0:
        before = origin[door]
        m, a = door // 2, before // 2
        if m == a:
            node[members[m]].load += number if door % 2 else -number
        elif stage_of[m] > stage_of[a]:
            taken[_pair(sketch, stage_of[a], a, m)] += number
        elif stage_of[m] < stage_of[a]:
            taken[_pair(sketch, stage_of[m], m, a)] -= number
        door = before
    return int(number)


@compiled()
def _rate(sketch: Sketch, stage: int, origin: Ints, stage_of: Ints) -> tuple[float, float]:
    """Micro-batches per second that leave the reached doors, and the seconds after which one more does. Every way out of the
    reached doors is busy."""
    rate, soonest = 0.0, np.inf
    for m in range(len(stage_of)):
        s, node = stage_of[m], sketch.node[sketch.members[m]]
        if origin[2 * m] != -2 and (s > stage or origin[2 * m + 1] == -2):
            rate += 1 / node.alone
            soonest = min(soonest, node.alone * (node.load + 1))
        if s <= stage and origin[2 * m + 1] != -2:
            for b in range(sketch.stage[s + 1].first, sketch.stage[s + 2].first):
                if origin[2 * b] == -2:
                    pair = _pair(sketch, s, m, b)
                    rate += 1 / max(sketch.each[pair], 1e-30)
                    soonest = min(soonest, sketch.each[pair] * (sketch.taken[pair] + 1))
    return rate, soonest * (1 + 1e-9)
