"""Where the model is cut into stages, given the group of nodes that holds each."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem

PACES = np.concatenate([np.geomspace(1.0, 2.0, 12), [2.5, 3.3, 5.0, 10.0, 20.0, np.inf]])
"""Paces that are tried: how many times slower the slowest stage or link may be than all devices together without a pause."""
FAR = 1e9
"""Seconds that stand for a missing link. The search discards plans with such links."""


def best_cuts(problem: Problem, groups: Groups) -> tuple[tuple[int, ...], float]:
    """Good cuts within every node's memory, and the shortfall in bytes.

    A step is estimated as one micro-batch's way forward and back, plus, for each other micro-batch, the time that the slowest
    stage or boundary needs for one: the pace. For each pace in PACES, dynamic programming over cuts finds the shortest way
    exactly; the best of these wins. A stage's speed is the sum of its nodes', which share the micro-batches. A boundary's
    speed is the mean link's times the number of links in use. The node with the least memory counts.

    A shortfall of 0 means that everything fits. Otherwise it is about the least number of bytes by which every device would
    have to be larger, and the cuts are those that would then fit.
    """
    layers, stages = len(problem.activation), len(groups)
    assert stages <= layers
    members = [np.array(group) for group in groups]
    speeds = [float(problem.flops[group].sum()) for group in members]
    # Of layers [first, past last), as [past last, first].
    work = _between(problem.flops_before)
    state = _between(problem.parameters_before) * problem.state_factor
    kept = _between(problem.kept_before)
    cannot = ~np.tri(layers + 1, k=-1, dtype=bool)  # a stage has at least one layer

    paces = PACES * max(3.0 * work[-1, 0] / sum(speeds), 1e-12)
    way = np.full((len(paces), layers + 1), np.inf)
    way[:, 0] = 0.0
    slowest = np.zeros_like(way)
    choices: list[Ints] = []
    rows, ends = np.arange(len(paces))[:, None], np.arange(layers + 1)
    for stage, group in enumerate(members):
        held = min(in_flight(stage, stages), problem.workload.micro_batches)
        no_room = state + held * kept > problem.memory[group].min()
        period = 3.0 * work / speeds[stage]
        passage = period * len(group)
        if stage < stages - 1:
            beat, transfer = _boundary(problem, group, members[stage + 1])
            period, passage = np.maximum(period, beat[:, None]), passage + transfer[:, None]
        passage = np.where(cannot | no_room, np.inf, passage)
        # [pace, past last, first]: the way through this stage; infinite where it is too slow for the pace.
        ways = np.where(period[None] <= paces[:, None, None], passage[None], np.inf)
        ways += way[:, None, :]
        choice = ways.argmin(axis=2)
        way = ways[rows, ends, choice]
        slowest = np.maximum(slowest[rows, choice], period[ends, choice])
        choices.append(choice)
    totals = way[:, -1] + (problem.workload.micro_batches - 1) * slowest[:, -1]
    best = int(totals.argmin())
    if not np.isfinite(totals[best]):
        return _nearly_fitting(problem, groups)
    cuts = [layers]
    for choice in reversed(choices):
        cuts.append(int(choice[best, cuts[-1]]))
    return tuple(reversed(cuts)), 0.0


def _between(before: Floats) -> Floats:
    return np.asarray(before[:, None] - before[None, :])


def _boundary(problem: Problem, senders: Ints, receivers: Ints) -> tuple[Floats, Floats]:
    """For each position of the cut: seconds per micro-batch while links are busy, and seconds for one forward and back."""
    there, back = np.ix_(senders, receivers), np.ix_(receivers, senders)
    size = np.append(0.0, problem.activation)
    slow, slow_back = float(problem.slowness[there].mean()), float(problem.slowness[back].mean())
    latency = float(problem.latency[there].mean() + problem.latency[back].mean())
    if not np.isfinite(slow + slow_back):
        return np.full(len(size), FAR), np.full(len(size), FAR)
    return size * max(slow, slow_back) / min(len(senders), len(receivers)), size * (slow + slow_back) + latency


def _nearly_fitting(problem: Problem, groups: Groups) -> tuple[tuple[int, ...], float]:
    """The cuts that fit with the least memory added to every device, and that memory in bytes.

    A bisection. Each of its tests is exact: taking as many layers as fit from the front leaves the fewest to the rest.
    """
    layers = len(problem.activation)
    rooms = [float(problem.memory[list(group)].min()) for group in groups]
    held = [min(in_flight(stage, len(groups)), problem.workload.micro_batches) for stage in range(len(groups))]
    needs = [
        (problem.parameters_before * problem.state_factor + count * problem.kept_before).tolist() for count in held
    ]

    def fill(extra: float) -> tuple[int, ...] | None:
        cuts = [0]
        for stage, (room, need) in enumerate(zip(rooms, needs, strict=True)):
            end = first = cuts[-1]
            last = layers - (len(groups) - 1 - stage)
            while end < last and need[end + 1] <= need[first] + room + extra:
                end += 1
            if end == first:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == layers else None

    low, high = 0.0, max(need[-1] for need in needs)
    best = fill(high)
    assert best is not None
    while high - low > 1.0 + 1e-6 * low:
        middle = (low + high) / 2
        cuts = fill(middle)
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return best, high
