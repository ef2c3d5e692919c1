"""What it takes to change from what nodes hold to another layout: state to fetch, and memory for both meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dtfm.scheduler.cost.room import Freeing, Room, freeing, place_of, room_of
from dtfm.scheduler.cost.state_transfer import Fetch, Fetching, Holdings, nothing_to_fetch
from dtfm.scheduler.model.keeping import keepings
from dtfm.scheduler.model.memory import Keeping
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Draft, Groups, Problem

MARGIN = 0.03
"""Fraction of its seconds per step by which a layout must beat the one in force: measurements vary by about this much. If nodes
have to free memory first, it must beat it by as much again: such a change is less sure than one beside what nodes hold.
"""


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of layout. ``freeing``: who has to free memory first, having no room for its old stage beside its new one. Such a
    node fetches nothing while the old layout trains, so that all wait for it."""

    fetch: Fetch
    freeing: tuple[Freeing, ...]

    @property
    def seconds(self) -> float:
        """Until the last node has its state; those who free first do so side by side."""
        return self.fetch.seconds + max((each.seconds for each in self.freeing), default=0.0)

    def counted(self, horizon: float) -> float:
        """The seconds of ``horizon`` as which it counts."""
        return self.seconds + (MARGIN * horizon if self.freeing else 0.0)


@dataclass(frozen=True, slots=True)
class Before:
    """What nodes hold before a change, under ``layout``; their memory may be full of more, of islands that are not in it."""

    problem: Problem
    layout: Plan
    holdings: Holdings
    room: Room

    @classmethod
    def of(cls, problem: Problem, layout: Plan, held: Plan | None = None) -> Before:
        """``held``: the layout whose stages nodes have in memory, if that is another."""
        return cls(problem, layout, Holdings.of(problem, layout), room_of(problem, held or layout))

    def switch(self, layout: Plan) -> Switch:
        """To ``layout``, whose nodes the cluster has."""
        return Switch(self.holdings.fetch_layout(layout), self.freeing(layout))

    def freeing(self, layout: Plan) -> tuple[Freeing, ...]:
        """Who has to free memory first for ``layout``."""
        numbers = {name: number for number, name in enumerate(self.problem.cluster.ids)}
        return freeing(
            self.room,
            (
                (numbers[name], *stage.layers, place_of(stage.keeping[place] if stage.keeping else Keeping()))
                for stage in layout.stages
                for place, name in enumerate(stage.replicas)
            ),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What a search for a plan of one island is told of a change: ``weight`` are the seconds per step that a second of it costs
    within ``horizon``. ``fetches``: whether state is fetched, or only memory counts."""

    before: Before
    weight: float
    horizon: float
    fetches: bool = True

    def fetching(self) -> Fetching:
        """Roughly, for compiled functions."""
        before, counts = self.before, MARGIN * self.horizon
        if self.fetches:
            return before.holdings.fetching(before.layout, self.weight, before.room, counts)
        nothing = nothing_to_fetch(*before.holdings.held.shape)
        return nothing._replace(weight=self.weight, room=before.room, freeing=counts)

    def surcharge(self, groups: Groups, cuts: tuple[int, ...]) -> float:
        """Seconds per step, exactly."""
        before = self.before
        fetch = before.holdings.fetch(groups, cuts) if self.fetches else Fetch(0, 0.0, 0.0)
        return self.weight * Switch(fetch, self._freeing(groups, cuts)).counted(self.horizon)

    def _freeing(self, groups: Groups, cuts: tuple[int, ...]) -> tuple[Freeing, ...]:
        room, problem = self.before.room, self.before.problem
        anywhere = (seat for where in np.flatnonzero(room.wheres).tolist() for seat in _seats(groups, cuts, where))
        if not freeing(room, anywhere):
            return ()  # wherever state is to be kept
        kept = keepings(problem, Draft.of(groups, cuts))
        places = {
            node: place_of(way)
            for group, ways in zip(groups, kept, strict=True)
            for node, way in zip(group, ways, strict=True)
        }
        return freeing(room, ((node, first, end, places[node]) for node, first, end, _ in _seats(groups, cuts, 0)))


def _seats(groups: Groups, cuts: tuple[int, ...], where: int) -> Iterator[tuple[int, int, int, int]]:
    for group, (first, past_last) in zip(groups, pairwise(cuts), strict=True):
        for node in group:
            yield node, first, past_last, where
