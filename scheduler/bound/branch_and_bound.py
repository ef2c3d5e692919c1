"""The plans of a small cluster that may beat a known one: built stage by stage, discarded once a bound rules them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dtfm.scheduler.bound.set_bounds import SetBounds
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.request import Shape

MOST_NODES = 8
"""Largest number of nodes. Eight form 255 possible groups per stage, whose combinations are bounded within a second."""
MOST_LAYERS = 48
"""Largest number of layers."""
AT_ONCE = 200_000
"""Number of continuations that are bounded together."""


def is_small(problem: Problem) -> bool:
    """Whether all plans can be listed in little time."""
    return len(problem.flops) <= MOST_NODES and len(problem.activation) <= MOST_LAYERS


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """Plans as rows, in the form of sketch.Position, with lower bounds on their seconds."""

    places: Ints
    """int64 [plans, nodes]."""
    cuts: Ints
    """int64 [plans, most stages + 1]."""
    stages: Ints
    """int64 [plans]."""
    bounds: Floats
    """float64 [plans], lower bounds on the plans' seconds per step."""
    least: float
    """Lower bound on the seconds per step of all plans."""
    whole: bool
    """No plan that may be fast enough is missing."""

    def groups_and_cuts(self, row: int) -> tuple[Groups, tuple[int, ...]]:
        stages = int(self.stages[row])
        groups = tuple(tuple(np.flatnonzero(self.places[row] == stage).tolist()) for stage in range(stages))
        return groups, tuple(self.cuts[row, : stages + 1].tolist())


def promising(
    problem: Problem, shape: Shape, keep_idle_hands: bool, below: float, most: int, over: Callable[[], bool]
) -> Plans:
    """The plans that may take less than ``below`` seconds, the least bound first.

    Covers all ordered choices of disjoint groups within the shape, with all cuts: feasible for a small cluster. Without
    ``keep_idle_hands``, every node gets at least one micro-batch. At most ``most`` partial plans of each length are continued,
    those with the least bounds. Only where there are more, or where ``over`` ends the enumeration early, can a plan be missed.
    """
    known = SetBounds.of(problem, keep_idle_hands)
    partial = _first(known, shape)
    parts, least, whole = [], below, True
    stages = shape.stages if shape.sizes is None else len(shape.sizes)
    for stage in range(shape.most_stages):
        partial = partial.only(partial.bound < below)
        ended = partial.end == known.layers
        if stages is None or stage + 1 == stages:
            found, left_out = partial.only(ended).divided(most)
            parts.append(found)
            whole = whole and left_out == np.inf
            least = min(least, float(found.bound.min(initial=np.inf)))
        partial, left_out = partial.only(~ended).divided(most)
        least, whole = min(least, left_out), whole and left_out == np.inf
        if stage + 1 == shape.most_stages or not len(partial.bound):
            break
        if over():
            least, whole = min(least, float(partial.bound.min())), False
            break
        partial = _continued(known, shape, partial, stage + 1, below)
    return _joined(parts, len(problem.flops), shape.most_stages, least, whole)


def _joined(parts: list[_PartialPlans], nodes: int, most_stages: int, least: float, whole: bool) -> Plans:
    """All plans of the parts, which have different numbers of stages."""
    places, cuts, stages, bounds = [], [], [], []
    for part in parts:
        place = np.full((len(part.bound), nodes), -1, dtype=np.int64)
        cut = np.zeros((len(part.bound), most_stages + 1), dtype=np.int64)
        for stage, masks in enumerate(part.groups.T):
            place[(masks[:, None] >> np.arange(nodes) & 1).astype(bool)] = stage
        cut[:, 1 : part.cuts.shape[1] + 1] = part.cuts
        places.append(place)
        cuts.append(cut)
        stages.append(np.full(len(part.bound), part.groups.shape[1], dtype=np.int64))
        bounds.append(part.bound)
    bound = np.concatenate([np.zeros(0), *bounds])
    order = np.argsort(bound, kind="stable")
    return Plans(
        np.concatenate([np.zeros((0, nodes), np.int64), *places])[order],
        np.concatenate([np.zeros((0, most_stages + 1), np.int64), *cuts])[order],
        np.concatenate([np.zeros(0, np.int64), *stages])[order],
        bound[order],
        least,
        whole,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PartialPlans:
    """Partial plans as rows. Sets of nodes are bit masks.

    ``arrival`` and ``home`` are the seconds of the first micro-batch's way to the last stage so far and back from it.
    ``wait`` is the longest time that any link so far needs for all micro-batches after the first.
    """

    groups: Ints
    cuts: Ints
    arrival: Floats
    home: Floats
    wait: Floats
    bound: Floats

    @property
    def used(self) -> Ints:
        return np.asarray(np.bitwise_or.reduce(self.groups, axis=1))

    @property
    def end(self) -> Ints:
        return np.asarray(self.cuts[:, -1])

    def only(self, rows: Ints | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> _PartialPlans:
        return _PartialPlans(
            self.groups[rows], self.cuts[rows], self.arrival[rows], self.home[rows], self.wait[rows], self.bound[rows]
        )

    def divided(self, most: int) -> tuple[_PartialPlans, float]:
        """The ``most`` plans with the least bounds, and the least bound of the others."""
        if len(self.bound) <= most:
            return self, np.inf
        order = np.argsort(self.bound, kind="stable")
        return self.only(order[:most]), float(self.bound[order[most]])


def _first(known: SetBounds, shape: Shape) -> _PartialPlans:
    masks, ends = np.nonzero(np.isfinite(known.alone[:, 0]))
    nothing = np.zeros(len(masks))
    return _weighed(known, shape, None, masks, ends, 0, nothing, nothing, nothing)


def _continued(known: SetBounds, shape: Shape, partial: _PartialPlans, stage: int, below: float) -> _PartialPlans:
    """All plans with one more stage that may still take less than ``below``."""
    parts = []
    every = np.arange(1, len(known.size))
    rows = max(1, AT_ONCE // (len(every) * known.layers))
    for at in range(0, len(partial.bound), rows):
        part = partial.only(np.arange(at, min(at + rows, len(partial.bound))))
        row, column = np.nonzero((part.used[:, None] & every) == 0)
        mask, last = every[column], part.groups[row, -1]
        cut = part.end[row]
        start = part.cuts[row, -2] if part.cuts.shape[1] > 1 else np.zeros(len(row), dtype=np.int64)
        size = known.activation[cut]
        quickest = known.work[start, cut] / known.flops[last]
        there = known.latency[last, mask] + size * known.slowness[last, mask]
        back = known.latency[mask, last] + size * known.slowness[mask, last]
        arrival = part.arrival[row] + quickest + there
        home = part.home[row] + (known.passes - 1) * quickest + back
        near = np.flatnonzero(arrival + home < below)
        row, mask, last, cut, size = row[near], mask[near], last[near], cut[near], size[near]
        wait = np.maximum(part.wait[row], size * known.crowding[last, mask])
        one, ends = np.nonzero(np.isfinite(known.alone[mask, cut]))
        made = _weighed(
            known, shape, part.only(row[one]), mask[one], ends, stage, arrival[near][one], home[near][one], wait[one]
        )
        parts.append(made.only(made.bound < below))
    return _PartialPlans(*(np.concatenate([getattr(part, name) for part in parts]) for name in _PartialPlans.__slots__))


def _weighed(
    known: SetBounds,
    shape: Shape,
    before: _PartialPlans | None,
    mask: Ints,
    end: Ints,
    stage: int,
    arrival: Floats,
    home: Floats,
    wait: Floats,
) -> _PartialPlans:
    """Plans that end with the stage [.., end) on the nodes of ``mask``, and their bounds."""
    cut = np.zeros(len(mask), dtype=np.int64) if before is None else before.end
    groups = mask[:, None] if before is None else np.column_stack([before.groups, mask])
    cuts = end[:, None] if before is None else np.column_stack([before.cuts, end])
    used = mask if before is None else before.used | mask
    work = known.work[cut, end]
    both = arrival + home
    quickest = work / known.flops[mask]
    rest = known.work[end, -1] / known.fastest
    bound = np.max(
        [
            arrival + known.alone[mask, cut, end],
            both + known.per_flop[mask] * work,
            both + known.passes * (quickest + rest) + wait,
            both + known.passes * quickest + known.rest_computed[used, end],
            arrival + quickest + known.rest_summed[used, end],
        ],
        axis=0,
    )
    if before is not None:
        bound = np.maximum(bound, before.bound)
    if shape.sizes is not None:
        bound = np.where(known.size[mask] == shape.sizes[stage], bound, np.inf)
    return _PartialPlans(groups, cuts, arrival, home, wait, bound * (1 - 1e-9))
