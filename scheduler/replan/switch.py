"""The cost of a change of layout: state to fetch, and memory for the old stages and the new ones at the same time."""

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
"""The gain that a new layout needs over the one in force, as a fraction of the seconds per step: measurements vary by about
this much. If nodes have to free memory first, it needs twice as much: such a change is less sure."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of layout. ``freeing``: nodes without room for their old stage beside their new one. These have to free memory
    first and fetch nothing while the old layout trains, so that all wait for them."""

    fetch: Fetch
    freeing: tuple[Freeing, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last node has its state. Nodes that free memory first free it at the same time."""
        return self.fetch.seconds + max((each.seconds for each in self.freeing), default=0.0)

    def counted(self, horizon: float) -> float:
        """The seconds of ``horizon`` that the change counts as."""
        return self.seconds + (MARGIN * horizon if self.freeing else 0.0)


@dataclass(frozen=True, slots=True)
class Before:
    """What nodes hold before a change, under ``layout``. Islands that are not in ``layout`` may fill their memory further."""

    problem: Problem
    layout: Plan
    holdings: Holdings
    room: Room

    @classmethod
    def of(cls, problem: Problem, layout: Plan, held: Plan | None = None, *, with_moments: bool = False) -> Before:
        """``held``: the layout whose stages nodes have in memory, if it differs from ``layout``. ``with_moments``: new islands
        also get moments."""
        holdings = Holdings.of(problem, layout, with_moments=with_moments)
        return cls(problem, layout, holdings, room_of(problem, held or layout))

    def switch(self, layout: Plan) -> Switch:
        """The change to ``layout``. The cluster has all its nodes."""
        return Switch(self.holdings.fetch_layout(layout), self.freeing(layout))

    def freeing(self, layout: Plan) -> tuple[Freeing, ...]:
        """The nodes that have to free memory first for ``layout``."""
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
    """The price of a change, for a search for a plan of one island. ``weight``: the seconds per step that a second of the
    change costs within ``horizon``. ``fetches``: whether state is fetched; otherwise only memory counts."""

    before: Before
    weight: float
    horizon: float
    fetches: bool = True

    def fetching(self) -> Fetching:
        """The rough price, for compiled functions."""
        before, counts = self.before, MARGIN * self.horizon
        if self.fetches:
            return before.holdings.fetching(before.layout, self.weight, before.room, counts)
        nothing = nothing_to_fetch(*before.holdings.held.shape)
        return nothing._replace(weight=self.weight, room=before.room, freeing=counts)

    def surcharge(self, groups: Groups, cuts: tuple[int, ...]) -> float:
        """The exact price, in seconds per step."""
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
