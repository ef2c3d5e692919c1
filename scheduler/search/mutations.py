"""Mutations: small random changes to which nodes hold which stage."""

from __future__ import annotations

from random import Random

import numpy as np
from scipy.optimize import linear_sum_assignment

from dtfm.scheduler.model.problem import Groups
from dtfm.scheduler.model.request import Shape


def neighbour(groups: Groups, nodes: int, shape: Shape, rng: Random) -> Groups | None:
    """A random small change within the shape, or None when the drawn one is impossible."""
    places = [list(group) for group in groups]
    used = {node for group in groups for node in group}
    idle = [node for node in range(nodes) if node not in used]
    kind = rng.choice(("swap", "swap", "swap", "relocate", "relocate", "in", "out", "order", "split", "merge"))
    match kind:
        case "swap":
            pools = [*places, idle]
            first, second = rng.randrange(len(pools)), rng.randrange(len(pools))
            if first == second or not pools[first] or not pools[second]:
                return None
            a, b = rng.randrange(len(pools[first])), rng.randrange(len(pools[second]))
            pools[first][a], pools[second][b] = pools[second][b], pools[first][a]
        case "relocate":
            source, target = rng.randrange(len(places)), rng.randrange(len(places))
            if source == target:
                return None
            places[target].append(places[source].pop(rng.randrange(len(places[source]))))
        case "in":
            if not idle:
                return None
            rng.choice(places).append(rng.choice(idle))
        case "out":
            group = rng.choice(places)
            group.pop(rng.randrange(len(group)))
        case "order":
            first, past = sorted(rng.sample(range(len(places) + 1), 2))
            places[first:past] = places[first:past][::-1]
        case "split":
            at = rng.randrange(len(places))
            group = places[at]
            rng.shuffle(group)
            half = len(group) // 2
            places[at : at + 1] = [group[:half], group[half:]]
        case "merge":
            if len(places) < 2:
                return None
            at = rng.randrange(len(places) - 1)
            places[at : at + 2] = [places[at] + places[at + 1]]
    changed = tuple(tuple(sorted(group)) for group in places if group)
    return changed if shape.admits(changed) and changed != groups else None


def shift_cut(cuts: tuple[int, ...], boundary: int, by: int) -> tuple[int, ...] | None:
    """One cut shifted ``by`` layers, or None where a stage would become empty."""
    shifted = (*cuts[:boundary], cuts[boundary] + by, *cuts[boundary + 1 :])
    return shifted if shifted[boundary - 1] < shifted[boundary] < shifted[boundary + 1] else None


def crossover(mother: Groups, father: Groups, shape: Shape, rng: Random) -> Groups | None:
    """The mother's plan with some stages of the father's; stages with the most nodes in common are paired first.

    Nodes that lose their place to a stage of the father fill the places that this leaves empty.
    """
    if len(mother) != len(father):
        return None
    overlap = np.array([[len(set(a) & set(b)) for b in father] for a in mother])
    _, partner = linear_sum_assignment(-overlap)
    taken = [rng.random() < 0.4 for _ in mother]
    child = [list(father[partner[stage]]) if take else [] for stage, take in enumerate(taken)]
    placed = {node for group in child for node in group}
    for stage, take in enumerate(taken):
        if not take:
            child[stage] = [node for node in mother[stage] if node not in placed]
    placed.update(node for group in child for node in group)
    homeless = [node for group in mother for node in group if node not in placed]
    rng.shuffle(homeless)
    for stage, group in enumerate(child):
        while homeless and len(group) < len(mother[stage]):
            group.append(homeless.pop())
        if shape.sizes is not None:
            del group[shape.sizes[stage] :]
    changed = tuple(tuple(sorted(group)) for group in child)
    return changed if shape.admits(changed) else None
