"""Crossover: a child takes each node's place from one of two parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.model.problem import Groups, Ints

FROM_FATHER = 0.5
"""The chance that a stage comes from the father."""
IN_DOUBT = 1e-3
"""Weight of common layers beside common nodes if both parents have the same number of stages. Otherwise both weigh 1."""


@dataclass(frozen=True, slots=True)
class Parent:
    """Groups and cuts, and the stage of each node: int64 [nodes], -1 for idle."""

    groups: Groups
    cuts: tuple[int, ...]
    place: Ints

    @classmethod
    def of(cls, groups: Groups, cuts: tuple[int, ...], nodes: int) -> Parent:
        place = np.full(nodes, -1, dtype=np.int64)
        for stage, group in enumerate(groups):
            place[list(group)] = stage
        return cls(groups, cuts, place)


def crossed(evaluator: Evaluator, mother: Parent, father: Parent, keep_sizes: bool, rng: Random) -> Candidate:
    """A child with the mother's number of stages, at its estimated price. Equal parents give themselves.

    Of each pair of aligned stages, chance takes the father's or the mother's. While the child does not work (a stage is empty,
    or memory, links or a proven node are missing), one more of the father's stages gives way to the mother's. With
    ``keep_sizes`` each stage has the mother's number of nodes. The cuts are the best of the mother's, the father's and new
    ones.
    """
    stages, nodes = len(mother.groups), len(mother.place)
    partner = aligned(mother, father)
    fathers = np.append(partner, -1)[father.place]  # -1, the last one, stays
    chosen = [stage for stage in sorted({*partner.tolist()}) if rng.random() < FROM_FATHER]
    rng.shuffle(chosen)
    coins = np.array([rng.random() < 0.5 for _ in range(nodes)])
    while chosen:
        place = mixed(mother.place, fathers, chosen, coins)
        if keep_sizes:
            place = sized(place, (mother.place, fathers), tuple(map(len, mother.groups)), rng)
        groups = tuple(tuple(np.flatnonzero(place == stage).tolist()) for stage in range(stages))
        if all(groups):
            cuts: list[tuple[int, ...] | None] = [
                mother.cuts,
                *([father.cuts] if len(father.cuts) == len(mother.cuts) else []),
            ]
            cuts += [] if groups == mother.groups else [None]
            child = min((evaluator.estimated(groups, each) for each in cuts), key=lambda one: one.price)
            if child.feasible:
                return child
        chosen.pop()
    return evaluator.estimated(mother.groups, mother.cuts)


def aligned(mother: Parent, father: Parent) -> Ints:
    """Returns, for each of the father's stages, the mother's stage that has most in common with it (linear assignment).

    Two stages have in common the share of all nodes that are in both, plus the share of all layers. If the father has more
    stages, a stage that is left over goes with the mother's stage that has most of its layers.
    """
    nodes, layers = len(mother.place), mother.cuts[-1]
    together = np.zeros((len(mother.groups), len(father.groups)))
    both = (mother.place >= 0) & (father.place >= 0)
    np.add.at(together, (mother.place[both], father.place[both]), 1.0 / nodes)
    ends = np.minimum.outer(np.array(mother.cuts[1:]), np.array(father.cuts[1:]))
    begins = np.maximum.outer(np.array(mother.cuts[:-1]), np.array(father.cuts[:-1]))
    layered = np.maximum(ends - begins, 0) / layers
    together += layered * (IN_DOUBT if len(mother.groups) == len(father.groups) else 1.0)
    partner = layered.argmax(axis=0)
    rows, columns = linear_sum_assignment(-together)
    partner[columns] = rows
    return np.asarray(partner, dtype=np.int64)


def mixed(mother: Ints, father: Ints, chosen: Sequence[int], coins: NDArray[np.bool_]) -> Ints:
    """Each node's stage in the child: int64 [nodes]. The parents' stages have the mother's numbers.

    A node that the father has in a ``chosen`` stage goes there. A node that the mother has in another stage stays there. For
    each of the other nodes chance (``coins``) decides: True gives it the father's place, False the mother's.
    """
    from_father, from_mother = np.isin(father, chosen), ~np.isin(mother, [*chosen, -1])
    return np.where(from_father | (~from_mother & coins), father, mother)


def sized(place: Ints, parents: tuple[Ints, Ints], sizes: tuple[int, ...], rng: Random) -> Ints:
    """The places with ``sizes`` nodes in each stage. In a stage with too many nodes, chance makes some idle. Idle nodes fill
    the gaps, first nodes that a parent has there."""
    made = place.copy()
    for stage, size in enumerate(sizes):
        members = np.flatnonzero(made == stage).tolist()
        made[rng.sample(members, max(0, len(members) - size))] = -1
    for stage, size in enumerate(sizes):
        idle = np.flatnonzero(made == -1).tolist()
        rng.shuffle(idle)
        idle.sort(key=lambda node: all(parent[node] != stage for parent in parents))
        made[idle[: size - int((made == stage).sum())]] = stage
    return made
