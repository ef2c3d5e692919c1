"""Lower bounds on the simulated time of a given plan of a small cluster."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.cost.load import group_loads
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem


def plan_bounds(problem: Problem, groups: Groups, cuts: Ints) -> Floats:
    """Lower bound on simulate's result, in seconds, for each of the cuts (rows): float64 [len(cuts)]; infinite where
    infeasible.

    The pipeline takes at least the first micro-batch's shortest way to a stage, then everything that one device, connection or
    link of the stage must do without a pause, then the shortest way back. The same holds for the reduction of a stage's
    gradients, where gradients that are final before a node's last backward pass ends can hide behind it.
    """
    stages = len(groups)
    members = [np.array(group) for group in groups]
    counts = [group_loads(problem, group) for group in members]
    if not all(count.all() for count in counts):
        return np.zeros(len(cuts))  # rare: requested places without any micro-batch
    work = np.diff(problem.flops_before[cuts], axis=1)
    quickest = work / np.array([problem.flops[group].max() for group in members])
    sizes = problem.activation[cuts[:, 1:-1] - 1]
    there, back, waits = (np.zeros((len(cuts), stages)) for _ in range(3))
    for stage in range(stages - 1):
        size = sizes[:, stage]
        for way, senders, receivers in ((there, stage, stage + 1), (back, stage + 1, stage)):
            index = np.ix_(members[senders], members[receivers])
            slowness = problem.slowness[index]
            with np.errstate(divide="ignore"):
                rates = 1.0 / slowness
                slowest = max(
                    (counts[senders] / rates.sum(axis=1)).max(), (counts[receivers] / rates.sum(axis=0)).max()
                )
            if not np.isfinite(slowest):
                return np.full(len(cuts), np.inf)
            way[:, stage] = problem.latency[index].min() + size * slowness.min()
            waits[:, stage] = np.maximum(waits[:, stage], size * (slowest - slowness.min()))
    arrival, homeward = np.zeros_like(work), np.zeros_like(work)
    arrival[:, 1:] = np.cumsum(quickest + there, axis=1)[:, :-1]
    homeward[:, 1:] = np.cumsum(2 * quickest + back, axis=1)[:, :-1]
    whole = (3 * quickest + there + back).sum(axis=1)
    bound = whole + waits.max(axis=1)
    beyond = (3 * quickest + there + back)[:, ::-1].cumsum(axis=1)[:, ::-1] - 3 * quickest
    for stage, group in enumerate(members):
        pace = work[:, stage, None] / problem.flops[group]
        busy = np.maximum(3 * counts[stage] * pace, 3 * pace + beyond[:, stage, None])
        ends = arrival[:, stage, None] + busy
        bound = np.maximum(bound, ends.max(axis=1) + homeward[:, stage])
        if np.isinf(problem.slowness[np.ix_(group, group)]).any():
            return np.full(len(cuts), np.inf)
        if len(group) > 1:
            bound = np.maximum(bound, reduction_bound(problem, group, cuts[:, stage : stage + 2], ends, pace))
    room = np.array([problem.memory[group].min() for group in members])
    lacking = (problem.stage_bytes(cuts) - room).max(axis=1)
    return np.where(lacking >= 1.0, np.inf, bound * (1 - 1e-9))


def reduction_bound(problem: Problem, group: Ints, layers: Ints, ends: Floats, pace: Floats) -> Floats:
    """The earliest end of a stage's reduction: float64 [stages].

    ``layers`` [stages, 2] are the stages that the group might hold, ``pace`` [stages, nodes] the seconds of a forward
    pass, ``ends`` [stages, nodes] the ends of the nodes' last backward passes.
    """
    index = np.ix_(group, group)
    slowness, latency = problem.slowness[index], problem.latency[index]
    shard = np.diff(problem.parameters_before[layers], axis=1)[:, 0] / len(group)
    last = (problem.parameters_before[layers[:, 0] + 1] - problem.parameters_before[layers[:, 0]]) / len(group)
    # Each link carries a shard there for the owner, and later the sender's own sum.
    begun = ends - 2 * pace
    carried = (begun[:, :, None] + 2 * shard[:, None, None] * slowness + latency).max(axis=(1, 2))
    # A node's last gradients go to every owner, and their sums from there to all other nodes.
    hop = last[:, None, None] * slowness + latency
    apart = ~np.eye(len(group), dtype=bool)
    onward = np.where(apart, hop, 0.0).max(axis=2)
    summed = (ends[:, :, None] + np.where(apart, hop + onward[:, None, :], 0.0)).max(axis=(1, 2))
    return np.asarray(np.maximum(carried, summed))
