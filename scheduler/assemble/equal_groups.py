"""Equal groups at their price in the paper's cost model: as walks try them, and as candidates of the search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.assemble.stage_order import EXACT_STAGES, best_order
from dtfm.scheduler.cost.paper import mean_of_pairs, paper_seconds, slowest_member, slowest_pair
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Draft, Floats, Groups, Problem
from dtfm.scheduler.model.sketch import Position, Sketch
from dtfm.scheduler.model.tables import Tables

SMOOTHING = 10.0
"""Weight of the levels, which tell apart positions of equal cost. With weight 1, walks over the paper's network "spot" ended 40 %
above the best: the slowest pair alone stays the same while many pairs must become faster together."""


@entry(makes_arrays=True)
def paper_price(t: Tables, position: Position, sketch: Sketch) -> float:
    """The seconds of a position by the paper's cost model. ``sketch`` has its members.

    Prices only groups that the last two positions do not have, and the boundaries beside them. Fills in the nodes that decide,
    and the levels: the mean seconds of groups, and the sum over boundaries of the geometric mean of slowest and mean pair.
    """
    stages, place, known = position.stages[0], position.place, sketch.known
    differ = np.zeros(2, np.int64)
    for node in range(len(place)):
        for which in range(2):
            differ[which] += known[which, node].place != place[node]
    base = 0 if differ[0] <= differ[1] else 1
    now = base
    if differ[base] > 0:
        now = 1 - base
        changed = np.zeros(stages, np.bool_)
        for node in range(len(place)):
            before = known[base, node].place
            if before != place[node]:
                if before >= 0:
                    changed[before] = True
                if place[node] >= 0:
                    changed[place[node]] = True
            if before == -2:
                changed[:] = True
        known[now] = known[base]
        for node in range(len(place)):
            known[now, node].place = place[node]
        _price_changed(t, sketch, stages, changed, now)
    worst, dearest, means, sums, longest, total = 0, 0, 0.0, 0.0, -1.0, 0.0
    for stage in range(stages):
        group = known[now, stage].group
        means += group
        if group > known[now, worst].group:
            worst = stage
        if stage < stages - 1:
            boundary = known[now, stage].boundary
            total += boundary
            sums += np.sqrt(boundary * known[now, stage].mean)
            if boundary > longest:
                dearest, longest = stage, boundary
    sketch.levels[0], sketch.levels[1] = SMOOTHING * means / stages, SMOOTHING * sums
    decides = sketch.decides
    if stages > 1:
        decides[0], decides[1], decides[2] = known[now, dearest].sender, known[now, dearest].receiver, dearest
    decides[3], decides[4], decides[5] = known[now, worst].slowest, -1, worst
    return float(total + known[now, worst].group)


@compiled()
def _price_changed(t: Tables, sketch: Sketch, stages: int, changed: NDArray[np.bool_], now: int) -> None:
    """Prices the groups that changed, and their boundaries."""
    known, first = sketch.known, sketch.stage
    for stage in range(stages):
        group = sketch.members[first[stage].first : first[stage + 1].first]
        if changed[stage]:
            slowest, seconds = slowest_member(t.paper[0], group)
            known[now, stage].slowest, known[now, stage].group = slowest, seconds
        if stage < stages - 1 and (changed[stage] or changed[stage + 1]):
            after = sketch.members[first[stage + 1].first : first[stage + 2].first]
            sender, receiver, seconds = slowest_pair(t.paper[1], group, after)
            known[now, stage].sender, known[now, stage].receiver = sender, receiver
            known[now, stage].boundary = seconds
            known[now, stage].mean = mean_of_pairs(t.paper[1], group, after)


def ordered(activations: Floats, groups: Groups) -> Groups:
    """The groups in the order whose boundaries cost least together: see best_order."""
    if not 2 < len(groups) <= EXACT_STAGES:
        return groups
    members = [np.array(group, dtype=np.int64) for group in groups]
    cost = np.zeros((len(groups), len(groups)))
    for one in range(len(groups)):
        for other in range(one):
            cost[one, other] = cost[other, one] = slowest_pair(activations, members[one], members[other])[2]
    return tuple(groups[stage] for stage in best_order(cost))


@dataclass(slots=True)
class PaperEvaluator(Evaluator):
    """Prices groups by the paper's cost model, in their best order. Cuts mean nothing to it; memory does not count."""

    by_paper: ClassVar[bool] = True

    def estimated(self, groups: Groups, cuts: tuple[int, ...] | None = None) -> Candidate:
        return self.simulated(groups)

    def simulated(self, groups: Groups, cuts: tuple[int, ...] | None = None) -> Candidate:
        groups = tuple(tuple(sorted(group)) for group in groups)
        key = (groups, ())
        if key not in self._simulated:
            self.spent += 1
            groups = ordered(self.tables.paper[1], groups)
            seconds = paper_seconds(self.tables.paper, groups).total
            self._simulated[key] = Candidate(Draft.of(groups, even_cuts(self.problem, len(groups))), 0.0, 0, seconds)
            self.best = min(self.best, seconds)
            self.met(0, self.best)
        return self._simulated[key]


def even_cuts(problem: Problem, stages: int) -> tuple[int, ...]:
    """Cuts into stages of as many layers each, as far as possible."""
    return tuple(np.round(np.linspace(0, len(problem.activation), stages + 1)).astype(int).tolist())
