"""What no stage on any set of nodes can beat: for small clusters, of which every set can be looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtfm.scheduler.bound.stage_bounds import crowding, reduced_after, soonest
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Floats, Ints, Problem
from dtfm.scheduler.model.tables import Tables, tables


@dataclass(frozen=True, slots=True, eq=False)
class SetBounds:
    """Least times per set of nodes (mask), per pair of sets, and per stage [first, past last).

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
    def of(cls, problem: Problem, keep_idle_hands: bool) -> SetBounds:
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


@compiled(makes_arrays=True)
def _members(count: int, mask: int) -> Ints:
    members = np.empty(count, np.int64)
    size = 0
    for node in range(count):
        if mask >> node & 1:
            members[size] = node
            size += 1
    return members[:size]


@entry(makes_arrays=True)
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


@entry(makes_arrays=True)
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
