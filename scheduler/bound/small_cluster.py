"""Whether a small cluster has a plan of a given time: all groups, and all partial plans that they form."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dtfm.scheduler.bound.capacity import Kinds
from dtfm.scheduler.bound.every_group import EveryGroup
from dtfm.scheduler.bound.group import MEMBER
from dtfm.scheduler.bound.partial_plan import PLAN, POSSIBLE, TOO_MANY, extend, least_additions, merged
from dtfm.scheduler.model.problem import Floats, Problem, Records
from dtfm.scheduler.model.tables import tables

MOST_ENTRIES = 8e6
"""Largest product of the numbers of kinds of stages and of groups."""
LOOKS = 3e7
"""Default number of groups that are looked at as a further stage of a partial plan: about a second."""
ENTRIES_PER_LOOK = 20
"""To price this many groups of one kind takes about as long as one look."""
CHUNK = 256
"""Partial plans that are extended at once."""
MADE = 100_000
"""Room for those that follow from them."""
GROWTH, CLOSE = 1.1, 1.008
"""Quotient of two times that are tried one after the other: the first, and one with which it is not worth it."""
FARTHEST = 10.0
"""Largest number of seconds that is tried, in times the first. Probably no plan exists then."""


def ruled_out_by_partition(problem: Problem, seconds: float, looks: float = LOOKS) -> Iterator[float]:
    """Numbers of seconds, never smaller than the one before, within which no plan can end; the first is ``seconds``.

    Ends when little can be gained, or after ``looks`` looks. With too many nodes it yields the first number only.
    """
    yield seconds
    kinds = Kinds.of(problem)
    if len(kinds.work) * 2.0 ** len(problem.flops) > MOST_ENTRIES:
        return
    prices: Floats = problem.flops / problem.flops.sum()
    growth, most = GROWTH, FARTHEST * seconds
    while growth > CLOSE and looks > 0 and seconds < most:
        groups = EveryGroup(problem, kinds, seconds * growth)
        yield seconds
        prices = groups.priced(prices)
        yield seconds
        attempt = _Attempt(groups, looks)
        for _ in attempt.steps():
            yield seconds
        looks -= attempt.looks + groups.entries / ENTRIES_PER_LOOK
        if attempt.ruled_out:
            seconds *= growth
            yield seconds
        else:
            growth = math.sqrt(growth)


class _Attempt:
    """Forms all partial plans, those with fewer layers first, until a plan is found, none is left, or it takes too long."""

    def __init__(self, groups: EveryGroup, most_looks: float) -> None:
        self._groups, self._most = groups, most_looks
        self._layers = len(groups.kinds.number) - 1
        nodes = len(groups.problem.flops)
        self._members = np.zeros(nodes, MEMBER)
        self._made, self._made_able = np.zeros(MADE, PLAN), np.zeros((MADE, nodes))
        self._waiting: list[list[tuple[Records, Floats]]] = [[] for _ in range(self._layers + 1)]
        self.looks, self.ruled_out = 0, False

    def steps(self) -> Iterator[None]:
        """One can stop after each."""
        if self._groups.cost > 1 + 1e-6:
            self.ruled_out = True
            return
        nothing = np.zeros(1, PLAN)
        nothing["room"] = self._groups.seconds
        self._waiting[self._layers].append((nothing, np.zeros((1, len(self._members)))))
        for layer in range(self._layers, 0, -1):
            if not self._waiting[layer]:
                continue
            plans, able = merged(*(np.concatenate(part) for part in zip(*self._waiting[layer], strict=True)))
            self._waiting[layer] = []
            for stages in np.unique(plans["stages"]).tolist():
                chosen = plans["stages"] == stages
                for possible in self._extended(plans[chosen], able[chosen], layer, stages):
                    if possible or self.looks > self._most:
                        return
                    yield
        self.ruled_out = True

    def _extended(self, plans: Records, able: Floats, layer: int, stages: int) -> Iterator[bool]:
        """Adds a stage to the plans, which have ``stages``. Yields, after each step, whether a plan with all layers may exist."""
        groups = self._groups
        numbers = np.ascontiguousarray(groups.kinds.number[:layer, layer])
        additions = least_additions(groups.deepest, groups.price, numbers, groups.before, stages)
        places = np.flatnonzero(additions + plans["price"].min() <= 1 + 1e-6)
        places = places[np.argsort(additions[places], kind="stable")]
        at = 0
        while at < len(plans):
            dealt, count, looks = extend(
                tables(groups.problem),
                groups.setting,
                plans[at : at + CHUNK],
                able[at : at + CHUNK],
                groups.group[places],
                places,
                additions[places],
                groups.price,
                groups.deepest,
                numbers,
                groups.before,
                self._members,
                self._made,
                self._made_able,
            )
            self.looks += looks
            if count in (TOO_MANY, POSSIBLE):
                yield True
                return
            made, made_able = self._made[:count], self._made_able[:count]
            for first in np.unique(made["layer"]).tolist():
                here = made["layer"] == first
                self._waiting[first].append((made[here], made_able[here]))
            at += dealt
            yield False
