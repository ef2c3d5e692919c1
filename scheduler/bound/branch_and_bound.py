"""The plans of a small cluster that may beat a known one: built stage by stage, discarded once a bound rules them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dtfm.scheduler.bound.stage_bounds import crowding, reduced_after, soonest
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.tables import Tables, tables

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
    known = _Bounds.of(problem, keep_idle_hands)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Bounds:
    """What the bounds are made of: per set of nodes (mask), per pair of sets, and per stage [first, past last).

    They hold for any loads, because a node's load depends on the stages beside its own.
    """

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
    """[mask] least seconds per FLOP of the stage until the mask's last node has computed its load."""
    alone: Floats
    """[mask, first, past last] least seconds from the arrival of a stage's first micro-batch until its gradients are
    summed; infinite where impossible."""
    latency: Floats
    """[mask, mask] latency of the best link."""
    slowness: Floats
    """[mask, mask] seconds per byte of the best link."""
    crowding: Floats
    """[mask, mask] least seconds per byte by which all micro-batches take longer over the boundary than one."""
    rest_computed: Floats
    """[used, first] least seconds from the arrival at layer ``first`` until the remaining stages have computed and
    the last micro-batch is back there."""
    rest_summed: Floats
    """[used, first] the same until the remaining stages' gradients are summed, without the way back."""
    fastest: float
    passes: float
    """Workload.passes."""

    @classmethod
    def of(cls, problem: Problem, keep_idle_hands: bool) -> _Bounds:
        count, layers = len(problem.flops), len(problem.activation)
        masks = 1 << count
        member = (np.arange(masks)[:, None] >> np.arange(count) & 1).astype(bool)
        work = np.maximum(problem.flops_before[None, :] - problem.flops_before[:, None], 0.0)
        flops = np.where(member, problem.flops, 0.0).max(axis=1)
        first, past_last = np.triu_indices(layers + 1, k=1)
        stage = np.stack([first, past_last], axis=1)
        kept = np.diff(problem.least_kept_before[stage], axis=1)[:, 0]
        most = problem.workload.micro_batches
        held = np.where(past_last == layers, in_flight(0, 1), min(in_flight(0, 2), most))
        need = (
            problem.workload.least_on_device(
                np.diff(problem.parameters_before[stage], axis=1)[:, 0],
                np.diff(problem.orthogonal_before[stage], axis=1)[:, 0],
            )
            + np.diff(problem.frozen_before[stage], axis=1)[:, 0]
            + held * kept
        )
        per_flop, alone = _alone(tables(problem), 0 if keep_idle_hands else 1)
        rooms = np.where(member, problem.memory, np.inf).min(axis=1)
        fits = np.zeros((masks, layers + 1, layers + 1), dtype=bool)
        fits[:, first, past_last] = need < rooms[:, None] + 1.0
        if problem.is_mixed:
            fits[~member[:, problem.proven].any(axis=1)] = False
        alone[~fits] = np.inf
        fastest = float(problem.flops.max())
        computed, summed = _rest(work, per_flop, alone, fastest, problem.workload.passes)
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
            np.minimum(_crowding(tables(problem)), 1e300),
            computed,
            summed,
            fastest,
            problem.workload.passes,
        )


def _least(matrix: Floats, member: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> Floats:
    """The least entry from a node of one mask to a node of the other: float64 [masks, masks]; infinite for the empty mask."""
    to = np.where(member[None], matrix[:, None, :], np.inf).min(axis=2)
    return np.asarray(np.where(member[:, :, None], to[None], np.inf).min(axis=1))


@compiled
def _members(count: int, mask: int) -> Ints:
    members = np.empty(count, np.int64)
    size = 0
    for node in range(count):
        if mask >> node & 1:
            members[size] = node
            size += 1
    return members[:size]


@compiled
def _alone(t: Tables, least_load: int) -> tuple[Floats, Floats]:
    """per_flop [masks] and alone [masks, layers + 1, layers + 1] without regard to memory; every node of a stage gets at least
    ``least_load`` micro-batches."""
    count, layers = len(t.link), len(t.layer) - 1
    per_flop = np.zeros(1 << count)
    alone = np.full((1 << count, layers + 1, layers + 1), np.inf)
    for mask in range(1, 1 << count):
        members = _members(count, mask)
        pace, after = np.empty(len(members)), np.zeros(len(members))
        missing = len(members) * least_load > t.micro_batches
        for a in range(len(members)):
            pace[a] = t.passes / t.node[members[a]].flops
            for b in members:
                missing = missing or np.isinf(t.link[members[a], b].slowness)
        if missing:
            continue
        per_flop[mask] = soonest(pace, after, t.micro_batches, least_load)
        for layer in range(layers):
            for past_last in range(layer + 1, layers + 1):
                work = t.layer[past_last].flops_before - t.layer[layer].flops_before
                for a in range(len(members)):
                    forward = work / t.node[members[a]].flops
                    pace[a] = t.passes * forward
                    after[a] = reduced_after(t, members, members[a], layer, past_last, forward)
                seconds = soonest(pace, after, t.micro_batches, least_load)
                alone[mask, layer, past_last] = max(per_flop[mask] * work, seconds)
    return per_flop, alone


@compiled
def _crowding(t: Tables) -> Floats:
    """[masks, masks] stage_bounds.crowding; infinite for masks that overlap."""
    count = len(t.link)
    made = np.full((1 << count, 1 << count), np.inf)
    for mask in range(1, 1 << count):
        senders = _members(count, mask)
        for other in range(1, 1 << count):
            if mask & other == 0:
                made[mask, other] = crowding(t, senders, _members(count, other))
    return made


def _rest(work: Floats, per_flop: Floats, alone: Floats, fastest: float, passes: float) -> tuple[Floats, Floats]:
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
        computed[used, :-1] = np.maximum(busy, passes * way + computed[after][:, None]).min(axis=(0, 2))[:-1]
        summed[used, :-1] = np.maximum(stage, way + summed[after][:, None]).min(axis=(0, 2))[:-1]
    return computed, summed


def _first(known: _Bounds, shape: Shape) -> _PartialPlans:
    masks, ends = np.nonzero(np.isfinite(known.alone[:, 0]))
    nothing = np.zeros(len(masks))
    return _weighed(known, shape, None, masks, ends, 0, nothing, nothing, nothing)


def _continued(known: _Bounds, shape: Shape, partial: _PartialPlans, stage: int, below: float) -> _PartialPlans:
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
    known: _Bounds,
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
