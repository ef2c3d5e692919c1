"""The scheduler that the paper's authors have published, written again from its method, and compiled.

DS3Lab/DT-FM, scheduler/heuristic_evolutionary_solver/scheduler.py (commit cda948f): 100 random placements, then 4,900 times a
child of two of them (arXiv 2206.01288, section 3.4). A child takes the groups of five nodes from one parent, and the groups of
all others from the other parent, under the numbers that groups happen to have. Then cycles of nodes change groups, to groups
that are far away. A probable slip there is kept: a child is compared with its first parent alone.
"""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.assemble.stage_order import cheapest_path
from dtfm.scheduler.cost.paper import slowest_member, slowest_pair
from dtfm.scheduler.model.compiled import entry
from dtfm.scheduler.model.problem import Floats, Ints

PARENTS, CHILDREN = 100, 4900
"""Random placements, and children of them."""
CROSSED = 5
"""Nodes whose groups a child takes from its first parent."""


@entry(makes_arrays=True)
def published_cost(exchanges: Floats, stages: int, parents: int, children: int, seed: int) -> float:
    """The least cost that the search finds. ``exchanges``: Problem.paper_exchanges, finite and symmetric."""
    np.random.seed(seed)
    nodes = exchanges.shape[1]
    size = nodes // stages
    places, costs = np.empty((parents, nodes), np.int64), np.empty(parents)
    for one in range(parents):
        order = np.random.permutation(nodes)
        for at in range(nodes):
            places[one, order[at]] = at // size
        costs[one] = cost_of(exchanges, places[one], stages)
    least = costs.min()
    for _ in range(children):
        first, second = np.random.randint(0, parents), np.random.randint(0, parents)
        child = _crossed(places[first], places[second], stages)
        cycled(exchanges[1], child, stages)
        cost = cost_of(exchanges, child, stages)
        least = min(least, cost)
        if cost <= costs[first]:
            replaced = first if costs[first] > costs[second] else second
            places[replaced], costs[replaced] = child, cost
    return float(least)


@entry(makes_arrays=True)
def cost_of(exchanges: Floats, place: Ints, stages: int) -> float:
    """The cost of groups in their best order. ``place`` is each node's group."""
    size = len(place) // stages
    members, filled = np.empty((stages, size), np.int64), np.zeros(stages, np.int64)
    for node in range(len(place)):
        members[place[node], filled[place[node]]] = node
        filled[place[node]] += 1
    boundary, longest = np.zeros((stages, stages)), 0.0
    for one in range(stages):
        longest = max(longest, slowest_member(exchanges[0], members[one])[1])
        for other in range(one):
            boundary[one, other] = slowest_pair(exchanges[1], members[one], members[other])[2]
            boundary[other, one] = boundary[one, other]
    return float(longest + cheapest_path(boundary)[1])


@entry(makes_arrays=True)
def _crossed(first: Ints, second: Ints, stages: int) -> Ints:
    """The second parent, with the groups that the first one gives some nodes; nodes too many go to the first group with room."""
    child, nodes = second.copy(), len(second)
    for node in np.random.permutation(nodes)[:CROSSED]:
        child[node] = first[node]
    size, sizes = nodes // stages, np.bincount(child, minlength=stages)
    for node in range(nodes):
        if sizes[child[node]] > size:
            room = 0
            while sizes[room] >= size:
                room += 1
            sizes[room] += 1
            sizes[child[node]] -= 1
            child[node] = room
    return child


@entry(makes_arrays=True)
def _wishes(seconds: Floats, place: Ints, stages: int, locked: Ints, gain: Floats, best: Floats, who: Ints) -> None:
    """Finds for each group the unlocked node with the nearest other member, and the gain of moving it to each other group.

    Fills in ``gain`` [groups, groups]. Fills in by group the ``best`` gain, and ``who`` [groups, 2] moves where.
    """
    nodes = len(place)
    sizes = np.bincount(place, minlength=stages)
    gain[:] = -np.inf
    best[:] = -np.inf
    who[:] = -1
    nearest = np.full(stages, np.inf)
    for node in range(nodes):
        if locked[node]:
            continue
        own = np.inf
        for other in range(nodes):
            if other != node and place[other] == place[node]:
                own = min(own, seconds[node, other])
        if own < nearest[place[node]]:
            nearest[place[node]] = own
            who[place[node], 0] = node
    mean = np.empty(stages)
    for group in range(stages):
        node = who[group, 0]
        if node < 0:
            continue
        mean[:] = 0.0
        for other in range(nodes):
            mean[place[other]] += seconds[node, other] / sizes[place[other]]
        for target in range(stages):
            if target != group:
                gain[group, target] = mean[target] - nearest[group]
                if gain[group, target] > best[group]:
                    best[group], who[group, 1] = gain[group, target], target


@entry(makes_arrays=True)
def cycled(seconds: Floats, place: Ints, stages: int) -> None:
    """Lets nodes change groups in cycles, in place: as many cycles as groups, each as long as it gains most."""
    nodes = len(place)
    locked, reached = np.zeros(nodes, np.int64), np.zeros(stages, np.int64)
    gain, best, who = np.empty((stages, stages)), np.empty(stages), np.empty((stages, 2), np.int64)
    tried, gains = np.empty((stages + 1, nodes), np.int64), np.zeros(stages + 1)
    tried[0] = place
    count = 1
    moved, gained, home = np.empty((nodes, 2), np.int64), np.empty(nodes), np.empty(nodes)
    for _ in range(stages):
        now = tried[count - 1].copy()
        _wishes(seconds, now, stages, locked, gain, best, who)
        start = int(np.argmax(best))
        group, moves = start, 0
        while moves < nodes:
            node, target = who[group, 0], who[group, 1]
            if node < 0:
                node, target = moved[moves - 1, 0], start
            now[node] = target
            locked[node] = reached[target] = 1
            moved[moves, 0], moved[moves, 1] = node, group
            gained[moves], home[moves] = best[group], gain[group, start]
            moves += 1
            group = target
            if group == start:
                break
            _wishes(seconds, now, stages, locked, gain, best, who)
        most, last = 0.0, 0
        for move in range(1, moves):
            total = gained[:move].sum() + home[move]
            if total > most:
                most, last = total, move
        for move in range(moves - 1, last, -1):
            now[moved[move, 0]] = moved[move, 1]
        now[moved[last, 0]] = start
        tried[count], gains[count] = now, most
        count += 1
        if reached.sum() == stages:
            break
    most, chosen = 0.0, 0
    for upto in range(1, count):
        total = gains[:upto].sum()
        if total > most:
            most, chosen = total, upto - 1
    place[:] = tried[chosen]
