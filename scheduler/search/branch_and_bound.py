"""The plans of a small cluster that may beat a known one: built stage by stage, discarded once a bound rules them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dtfm.scheduler.cost.load import group_loads
from dtfm.scheduler.cost.plan_bounds import reduction_bound
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.request import Shape

AT_ONCE = 200_000
"""Number of continuations that are bounded at once."""


def promising(
    problem: Problem, shape: Shape, keep_idle_hands: bool, below: float, most: int, over: Callable[[], bool]
) -> list[tuple[float, Groups, tuple[int, ...]]]:
    """The plans that may take less than ``below`` seconds, as (bound, groups, cuts), the least bound first.

    Covers all ordered choices of disjoint groups within the shape, with all cuts: feasible for up to about eight
    nodes. At most ``most`` partial plans of each length are continued, those with the least bounds. Only where there
    are more, or where ``over`` ends the enumeration early, can a plan be missed.
    """
    tables = _Tables.of(problem, keep_idle_hands)
    partial, whole = _first(tables, shape), []
    stages = shape.stages if shape.sizes is None else len(shape.sizes)
    for stage in range(shape.most_stages):
        partial = partial.only(partial.bound < below)
        ended = partial.end == tables.layers
        if stages is None or stage + 1 == stages:
            whole += partial.only(ended).least(most).plans()
        partial = partial.only(~ended).least(most)
        if stage + 1 == shape.most_stages or not len(partial.bound) or over():
            break
        partial = _continued(tables, shape, partial, stage + 1, below)
    return sorted(whole)


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

    def least(self, most: int) -> _PartialPlans:
        """The ``most`` plans with the least bounds."""
        return self if len(self.bound) <= most else self.only(np.argsort(self.bound, kind="stable")[:most])

    def plans(self) -> list[tuple[float, Groups, tuple[int, ...]]]:
        return [
            (bound, tuple(nodes_of(mask) for mask in masks), (0, *cuts))
            for bound, masks, cuts in zip(self.bound.tolist(), self.groups.tolist(), self.cuts.tolist(), strict=True)
        ]


def nodes_of(mask: int) -> tuple[int, ...]:
    return tuple(node for node in range(mask.bit_length()) if mask >> node & 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """What the bounds are made of: per set of nodes (mask), per pair of sets, and per stage [first, past last)."""

    layers: int
    size: Ints
    """Number of nodes of a mask."""
    work: Floats
    """[first, past last] FLOPs."""
    activation: Floats
    """[cut] bytes that cross it, 0 at both ends."""
    flops: Floats
    """[mask] FLOP/s of its fastest node."""
    per_flop: Floats
    """[mask] seconds per FLOP of the stage until the mask's last node has computed its load."""
    alone: Floats
    """[mask, first, past last] seconds from the arrival of a stage's first micro-batch until its gradients are
    summed; infinite where impossible."""
    latency: Floats
    """[mask, mask] latency of the best link."""
    slowness: Floats
    """[mask, mask] seconds per byte of the best link."""
    crowded: Floats
    """[mask, mask] seconds that the busiest node's links need for its whole load, per byte of one micro-batch."""
    rest_computed: Floats
    """[used, first] least seconds from the arrival at layer ``first`` until the remaining stages have computed and
    the last micro-batch is back there."""
    rest_summed: Floats
    """[used, first] the same until the remaining stages' gradients are summed, without the way back."""
    fastest: float

    @classmethod
    def of(cls, problem: Problem, keep_idle_hands: bool) -> _Tables:
        count, layers = len(problem.flops), len(problem.activation)
        masks = 1 << count
        member = (np.arange(masks)[:, None] >> np.arange(count) & 1).astype(bool)
        work = np.maximum(problem.flops_before[None, :] - problem.flops_before[:, None], 0.0)
        flops = np.where(member, problem.flops, 0.0).max(axis=1)
        first, past_last = np.triu_indices(layers + 1, k=1)
        stage = np.stack([first, past_last], axis=1)
        kept = np.diff(problem.kept_before[stage], axis=1)[:, 0]
        most = problem.workload.micro_batches
        held = np.where(past_last == layers, in_flight(0, 1), min(in_flight(0, 2), most))
        need = np.diff(problem.parameters_before[stage], axis=1)[:, 0] * problem.state_factor + held * kept
        each = np.zeros((masks, count))
        per_flop = np.zeros(masks)
        alone = np.full((masks, layers + 1, layers + 1), np.inf)
        for mask in range(1, masks):
            group = np.flatnonzero(member[mask])
            if np.isinf(problem.slowness[np.ix_(group, group)]).any():
                continue
            counts = group_loads(problem, group)
            idle_hands = not counts.all()
            if idle_hands and not keep_idle_hands:
                continue
            possible = need < problem.memory[group].min() + 1.0
            seconds = np.zeros(len(first))
            if not idle_hands:  # a rare case: requested places without any micro-batch
                each[mask, group] = counts
                per_flop[mask] = 3 * float((counts / problem.flops[group]).max())
                pace = work[first, past_last][:, None] / problem.flops[group]
                ends = 3 * counts * pace
                seconds = ends.max(axis=1)
                if len(group) > 1:
                    seconds = np.maximum(seconds, reduction_bound(problem, group, stage, ends, pace))
            alone[mask, first, past_last] = np.where(possible, seconds, np.inf)
        fastest = float(problem.flops.max())
        computed, summed = _rest(work, per_flop, alone, fastest)
        apart = np.where(np.eye(count, dtype=bool), np.inf, problem.slowness)
        return cls(
            layers,
            member.sum(axis=1),
            work,
            np.concatenate([[0.0], problem.activation[:-1], [0.0]]),
            np.maximum(flops, 1e-300),
            per_flop,
            alone,
            _least(problem.latency, member),
            _least(problem.slowness, member),
            _crowded(apart, member, each),
            computed,
            summed,
            fastest,
        )


def _least(matrix: Floats, member: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> Floats:
    """The least entry from a node of one mask to a node of the other: float64 [masks, masks]; infinite for the empty mask."""
    to = np.where(member[None], matrix[:, None, :], np.inf).min(axis=2)
    return np.asarray(np.where(member[:, :, None], to[None], np.inf).min(axis=1))


def _crowded(slowness: Floats, member: np.ndarray[tuple[int, int], np.dtype[np.bool_]], each: Floats) -> Floats:
    """Seconds per byte that a node's links to the other mask need together for its whole load, for the busiest node
    on either side: float64 [masks, masks]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = 1.0 / slowness
        out, into = rate @ member.T.astype(float), rate.T @ member.T.astype(float)
        sent = np.nan_to_num(each[:, :, None] / out[None], nan=0.0, posinf=np.inf).max(axis=1)
        received = np.nan_to_num(each[:, :, None] / into[None], nan=0.0, posinf=np.inf).max(axis=1).T
    return np.asarray(np.maximum(sent, received))


def _rest(work: Floats, per_flop: Floats, alone: Floats, fastest: float) -> tuple[Floats, Floats]:
    """Least seconds of the stages still to come, by the nodes already used and the first layer.

    Dynamic programming over both; links are left out.
    """
    masks, layers = len(per_flop), work.shape[0] - 1
    computed, summed = np.full((masks, layers + 1), np.inf), np.full((masks, layers + 1), np.inf)
    computed[:, -1] = summed[:, -1] = 0.0
    way = work / fastest
    for used in reversed(range(masks)):
        free = 1 + np.flatnonzero(np.arange(1, masks) & used == 0)
        if not len(free):
            continue
        stage = alone[free]
        busy = np.where(np.isinf(stage), np.inf, per_flop[free, None, None] * work)
        after = used | free
        computed[used, :-1] = np.maximum(busy, 3 * way + computed[after][:, None]).min(axis=(0, 2))[:-1]
        summed[used, :-1] = np.maximum(stage, way + summed[after][:, None]).min(axis=(0, 2))[:-1]
    return computed, summed


def _first(tables: _Tables, shape: Shape) -> _PartialPlans:
    masks, ends = np.nonzero(np.isfinite(tables.alone[:, 0]))
    nothing = np.zeros(len(masks))
    return _weighed(tables, shape, None, masks, ends, 0, nothing, nothing, nothing)


def _continued(tables: _Tables, shape: Shape, partial: _PartialPlans, stage: int, below: float) -> _PartialPlans:
    """All plans with one more stage that may still take less than ``below``."""
    parts = []
    every = np.arange(1, len(tables.size))
    rows = max(1, AT_ONCE // (len(every) * tables.layers))
    for at in range(0, len(partial.bound), rows):
        part = partial.only(np.arange(at, min(at + rows, len(partial.bound))))
        row, column = np.nonzero((part.used[:, None] & every) == 0)
        mask, last = every[column], part.groups[row, -1]
        cut = part.end[row]
        start = part.cuts[row, -2] if part.cuts.shape[1] > 1 else np.zeros(len(row), dtype=np.int64)
        size = tables.activation[cut]
        quickest = tables.work[start, cut] / tables.flops[last]
        there = tables.latency[last, mask] + size * tables.slowness[last, mask]
        back = tables.latency[mask, last] + size * tables.slowness[mask, last]
        arrival = part.arrival[row] + quickest + there
        home = part.home[row] + 2 * quickest + back
        near = np.flatnonzero(arrival + home < below)
        row, mask, last, cut, size = row[near], mask[near], last[near], cut[near], size[near]
        crowding = np.maximum(
            tables.crowded[last, mask] - tables.slowness[last, mask],
            tables.crowded[mask, last] - tables.slowness[mask, last],
        )
        wait = np.maximum(part.wait[row], size * crowding)
        one, ends = np.nonzero(np.isfinite(tables.alone[mask, cut]))
        made = _weighed(
            tables, shape, part.only(row[one]), mask[one], ends, stage, arrival[near][one], home[near][one], wait[one]
        )
        parts.append(made.only(made.bound < below))
    return _PartialPlans(*(np.concatenate([getattr(part, name) for part in parts]) for name in _PartialPlans.__slots__))


def _weighed(
    tables: _Tables,
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
    work = tables.work[cut, end]
    both = arrival + home
    quickest = work / tables.flops[mask]
    rest = tables.work[end, -1] / tables.fastest
    bound = np.max(
        [
            arrival + tables.alone[mask, cut, end],
            both + tables.per_flop[mask] * work,
            both + 3 * (quickest + rest) + wait,
            both + 3 * quickest + tables.rest_computed[used, end],
            arrival + quickest + tables.rest_summed[used, end],
        ],
        axis=0,
    )
    if before is not None:
        bound = np.maximum(bound, before.bound)
    if shape.sizes is not None:
        bound = np.where(tables.size[mask] == shape.sizes[stage], bound, np.inf)
    return _PartialPlans(groups, cuts, arrival, home, wait, bound * (1 - 1e-9))
