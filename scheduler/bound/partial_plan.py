"""Partial plans of a small cluster: the stages from some layer to the last, with all their nodes.

A partial plan grows by a stage before its first one, whose nodes it has not used. It is dropped when no plan of the given time
can contain it:

- Price. Its nodes and the cheapest chain of groups for the layers before cost more than 1 (every_group.py).
- Links. The loads of a stage must be such that every member can complete its own, pass them on over its links to the members of
  the next stage, and get them from the members of the stage before.
- Tails. The sums of a stage's gradients are sent when all its replicas have begun their last backward pass. That is the stage's
  tail, and all other stages wait for the longest one. Stages behind have ended their last backward pass before it. Stages before
  have begun their last forward pass, and with at most d micro-batches in flight they have by then ended all but d - 1 backward
  passes.

Of partial plans with the same nodes, the same first group and the same layers only one is kept, with the best of everything.
This is the label setting of Desrochers, Desrosiers and Solomon (1992, A New Optimization Algorithm for the Vehicle Routing
Problem with Time Windows), with stages for customers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dtfm.scheduler.bound.group import Setting, complete, gather, slower, whole
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Ints, Records
from dtfm.scheduler.model.tables import Tables

PLAN = np.dtype(
    [
        ("layer", np.int64),  # the first layer that it has
        ("nodes", np.int64),  # all its nodes
        ("group", np.int64),  # those of its first stage
        ("stages", np.int64),
        ("price", np.float64),
        ("tail", np.float64),  # seconds of its longest tail
        ("room", np.float64),  # seconds of the longest tail that a stage before may have
    ]
)
TOO_MANY = -1
"""There is no room for all partial plans that follow from one."""
POSSIBLE = -2
"""A plan with all layers was found."""


@compiled
def least_additions(deepest: np.ndarray, price: Floats, numbers: Ints, before: Floats, stages: int) -> Floats:
    """The least price of each group, as a stage behind which there are ``stages``, and of all groups before it: float64 [groups].

    ``numbers`` is int64 [layers]: the kind of the stage from each of them to the first layer of a partial plan.
    """
    least = np.full(len(price), np.inf)
    for first in range(len(numbers)):
        if stages + 1 >= before.shape[1] or not before[first, stages + 1] < np.inf:
            continue
        for place in range(len(price)):
            if deepest[numbers[first], place] > stages:
                least[place] = min(least[place], price[place] + before[first, stages + 1])
    return least


@compiled
def extend(
    t: Tables,
    s: Setting,
    plans: Records,
    able: Floats,
    groups: Ints,
    places: Ints,
    additions: Floats,
    price: Floats,
    deepest: np.ndarray,
    numbers: Ints,
    before: Floats,
    members: Records,
    made: Records,
    made_able: Floats,
) -> tuple[int, int, int]:
    """Puts all partial plans that follow from ``plans`` into ``made``, until it is full.

    All plans have the same first layer, len(numbers), and number of stages. ``able`` is float64 [plans, nodes], what the members
    of each plan's first stage can complete and pass on. ``groups`` are the groups that may come before, with their ``places`` in
    ``price`` and ``deepest``, in order of their least ``additions``.

    Returns how many of the plans are dealt with, how many were made (or TOO_MANY or POSSIBLE), and how many groups were looked
    at.
    """
    made_count, looks, layer = 0, 0, len(numbers)
    nodes = len(t.link)
    links, passing = np.zeros((nodes, nodes)), np.zeros(nodes)
    for a in range(nodes):
        for b in range(nodes):
            if a != b and slower(t, a, b) < np.inf:
                each = t.layer[max(layer - 1, 0)].activation * slower(t, a, b)
                links[a, b] = whole(s.seconds / max(each, 1e-300), float(t.micro_batches))
    for at in range(len(plans)):
        plan = plans[at]
        kept = made_count
        for index in range(len(groups)):
            if plan.price + additions[index] > 1 + 1e-6:
                break
            looks += 1
            group, place = groups[index], places[index]
            if group & plan.nodes:
                continue
            if plan.stages and not _joined(t, links, plan.group, able[at], group, passing):
                continue
            count, slowest = gather(t, group, members)
            for first in range(layer):
                if deepest[numbers[first], place] <= plan.stages:
                    continue
                if plan.price + price[place] + before[first, plan.stages + 1] > 1 + 1e-6:
                    continue
                looks += 1
                kind = s.kind[numbers[first]]
                tail = kind.parameters / count * slowest if count > 1 else 0.0
                if tail > plan.room or not _passed_on(t, s, members, count, slowest, numbers[first], plan, passing):
                    continue
                if first == 0:
                    return at, POSSIBLE, looks
                if made_count == len(made):
                    if kept == 0:
                        return at, TOO_MANY, looks
                    return at, kept, looks
                new = made[made_count]
                new.layer, new.nodes, new.group, new.stages = first, plan.nodes | group, group, plan.stages + 1
                new.price, new.tail = plan.price + price[place], max(plan.tail, tail)
                new.room = _room(t, members, count, kind.work, s.seconds, plan.room)
                made_able[made_count] = 0.0
                for member in members[:count]:
                    made_able[made_count, member.node] = member.able
                made_count += 1
    return len(plans), made_count, looks


@compiled
def _joined(t: Tables, links: Floats, group: int, able: Floats, other: int, passing: Floats) -> bool:
    """Whether the links between two stages suffice for what the members of ``group`` are able to complete. Fills in how many
    micro-batches the links of each node of the ``other`` group carry."""
    total = 0.0
    for a in range(len(able)):
        passing[a] = 0.0
    for a in range(len(able)):
        if (group >> a) & 1:
            carried = 0.0
            for b in range(len(able)):
                if (other >> b) & 1:
                    carried += links[a, b]
                    passing[b] += links[a, b]
            total += min(carried, able[a])
    return total >= t.micro_batches


@compiled
def _passed_on(
    t: Tables,
    s: Setting,
    members: Records,
    count: int,
    slowest: float,
    number: int,
    plan: Any,
    passing: Floats,
) -> bool:
    """Whether a group can complete all micro-batches before ``plan``, pass them on and end before its tails. Fills in able."""
    complete(t, s, members, count, slowest, number)
    if plan.stages == 0:
        return True
    kind, total = s.kind[number], 0.0
    for member in members[:count]:
        # The most in flight: in_flight.depth_of.
        room = np.floor((t.node[member.node].memory - kind.state) / max(kind.kept, 1.0))
        held = max(t.least_held[plan.stages + 1, 0], room)
        pace = max(kind.work / t.node[member.node].flops, 1e-300)
        begun = whole(((s.seconds - plan.tail) / pace + 2 * held) / 3, float(t.micro_batches))
        member.able = min(member.able, min(begun, passing[member.node]))
        total += member.able
    return total >= t.micro_batches


@compiled
def _room(t: Tables, members: Records, count: int, work: float, seconds: float, longest: float) -> float:
    """The longest tail, at most ``longest``, before which the members can end all their passes."""
    low, high = 0.0, longest
    while high - low > 1e-3 * seconds:
        middle = high if high == longest else (low + high) / 2
        total = 0.0
        for member in members[:count]:
            pace = max(work / t.node[member.node].flops, 1e-300)
            total += min(member.able, whole((seconds - middle) / (3 * pace), float(t.micro_batches)))
        if total >= t.micro_batches:
            if middle == high:
                return high
            low = middle
        elif middle == longest:
            high = np.nextafter(longest, 0.0)
        else:
            high = middle
    return high


def merged(plans: Records, able: Floats) -> tuple[Records, Floats]:
    """One partial plan for each set of nodes and first group, with the best of everything. All have the same layers."""
    order = np.lexsort((plans["group"], plans["nodes"]))
    plans, able = plans[order], able[order]
    new = np.ones(len(plans), dtype=bool)
    new[1:] = (np.diff(plans["nodes"]) != 0) | (np.diff(plans["group"]) != 0)
    starts = np.flatnonzero(new)
    one = plans[starts]
    for name, best in (("stages", np.minimum), ("tail", np.minimum), ("room", np.maximum)):
        one[name] = best.reduceat(plans[name], starts)
    return one, np.maximum.reduceat(able, starts, axis=0)
