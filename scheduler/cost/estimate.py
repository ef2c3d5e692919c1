"""A fast estimate of the seconds per step, which the search computes thousands of times."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.model.problem import Draft, Floats, Ints, Problem

EXACT_GROUP = 48
"""Largest number of replicas whose reduction is followed link by link: the number of messages grows with its square."""


def estimate(problem: Problem, draft: Draft) -> float:
    """Seconds for one step of the draft; infinite when a link that it needs does not exist.

    For every resource (a device, one direction of a link, everything that a node sends or receives) the step takes at least
    the first micro-batch's way to it, its whole load, and the last micro-batch's way from it back to the first stage. The
    largest of these stands for the pipeline. A node that holds few micro-batches in flight completes at most that number per
    round trip. Then every stage reduces its gradients link by link, the last stages earlier than the first.
    """
    chains, shares = draft.routes
    stages = len(draft.groups)
    cuts = np.array(draft.cuts)
    count = len(problem.flops)
    work = np.diff(problem.flops_before[cuts])
    forward = work / problem.flops[chains]
    load = _sums(np.arange(stages) * count + chains, shares)

    sizes = problem.activation[cuts[1:-1] - 1]
    senders, receivers = chains[:, :-1], chains[:, 1:]
    transfer = sizes * problem.slowness[senders, receivers]
    transfer_back = sizes * problem.slowness[receivers, senders]
    there = problem.latency[senders, receivers] + transfer
    back = problem.latency[receivers, senders] + transfer_back
    if not (np.isfinite(there).all() and np.isfinite(back).all()):
        return float("inf")

    # When the first micro-batch arrives at each stage, and how long the last one takes from its backward pass there to the end.
    arrival = np.zeros_like(forward)
    arrival[:, 1:] = np.cumsum(forward[:, :-1] + there, axis=1)
    return_trip = np.zeros_like(forward)
    return_trip[:, 1:] = np.cumsum(2 * forward[:, :-1] + back, axis=1)
    beyond = 3 * forward
    beyond[:, :-1] += there + back
    round_trip = np.cumsum(beyond[:, ::-1], axis=1)[:, ::-1]

    busy = np.maximum(3 * forward * load, round_trip * load / np.minimum(depths(problem, draft), load))
    pipeline = (arrival + busy + return_trip).max()

    if stages > 1:
        pairs = (np.arange(stages - 1) * count + senders) * count + receivers
        together = _sums(pairs, shares)
        before = arrival[:, :-1] + forward[:, :-1]
        link = np.maximum(transfer, transfer_back) * (together - 1) + round_trip[:, :-1] - forward[:, :-1]
        pipeline = max(pipeline, (before + link + return_trip[:, :-1]).max())
        limits = _shared_connections(problem, chains, load, sizes)
        pipeline = max(pipeline, (arrival + limits + return_trip).max())

    # A chain ends when its slowest device does; each stage ends earlier by the way back from it.
    chain_ends = (arrival + busy + return_trip).max(axis=1)
    ends = np.zeros((stages, count))
    for stage in range(stages):
        np.maximum.at(ends[stage], chains[:, stage], chain_ends - return_trip[:, stage])
    layers = np.diff(cuts)
    gradients = np.diff(problem.parameters_before[cuts])
    finished = float(pipeline)
    for stage, group in enumerate(draft.groups):
        members = np.array(group)
        hidden = 2 * work[stage] / problem.flops[members] * (1 - 1 / layers[stage])
        finished = max(
            finished,
            _reduced(problem, members, ends[stage, members], hidden, float(gradients[stage]), int(layers[stage])),
        )
    return finished


def _reduced(problem: Problem, group: Ints, ends: Floats, hidden: Floats, gradient_bytes: float, layers: int) -> float:
    """When the gradients of a stage are reduced, in seconds from the start of the step.

    The nodes finish their last backward pass at ``ends``; ``hidden`` seconds before that, most gradients are final.
    Every link carries a shard to its owner and, once the last node's gradients are final, the same amount of sums;
    the last layer's gradients go forward and back alone.
    """
    copies = problem.cluster.copies
    if len(group) * copies == 1:
        return float(ends[0])
    if copies > 1 or len(group) > EXACT_GROUP:
        transfer, latency = reduction(problem, group, gradient_bytes)
        return float(ends.max()) + max(transfer - float(hidden.min()), transfer / layers) + latency
    index = np.ix_(group, group)
    shard = gradient_bytes / len(group)
    slowness, latencies = problem.slowness[index], problem.latency[index]
    apart = problem.ratio[index] * (1 - np.eye(len(group)))
    up, down = problem.up[group], problem.down[group]
    if min(up.min(), down.min()) == 0 or not np.isfinite(slowness).all():
        return float("inf")
    begun, last = ends - hidden, int(ends.argmax())
    link = np.maximum(slowness, (apart.sum(axis=1) / up)[:, None])
    link = np.maximum(link, (apart.sum(axis=0) / down)[None])
    np.fill_diagonal(link, 0.0)
    there = begun[:, None] + shard * link
    complete = np.maximum(there, ends[:, None] + shard / layers * link) + latencies
    summed = complete.max(axis=0)  # per owner
    early = np.maximum(there.max(axis=1), begun[last])
    onward = np.maximum(early[:, None] + shard * link, summed[:, None] + shard / layers * link) + latencies
    return float(onward.max())


def reduction(problem: Problem, group: Ints, gradient_bytes: float) -> tuple[float, float]:
    """Seconds of transfer and of latency to reduce a stage's gradients (arXiv 2206.01288, section 3.2).

    Each replica owns a shard: reduce-scatter, then all-gather. A node sends to all others at once, so the transfer takes as
    long as the slowest link, or as the slowest connection needs to send or receive one shard per other replica.
    """
    copies = problem.cluster.copies
    replicas = len(group) * copies
    if replicas == 1:
        return 0.0, 0.0
    shard = gradient_bytes / replicas
    index = np.ix_(group, group)
    up, down = problem.up[group], problem.down[group]
    if min(up.min(), down.min()) == 0:
        return float("inf"), 0.0
    # A node of a miniature also exchanges shards with the nodes it stands for, but not with itself.
    ratio = problem.ratio[index] * (copies - np.eye(len(group)))
    connections = max(float((ratio.sum(axis=1) / up).max()), float((ratio.sum(axis=0) / down).max()))
    slowest = shard * max(float(problem.slowness[index].max()), float(problem.own_slowness[group].max()), connections)
    return 2 * slowest, 2 * float(problem.latency[index].max())


def _shared_connections(problem: Problem, chains: Ints, load: Floats, sizes: Floats) -> Floats:
    """Seconds that each node of each chain needs to send, or to receive, all its activations and gradients: the
    larger of both."""
    senders, receivers = chains[:, :-1], chains[:, 1:]
    forward, backward = sizes * problem.ratio[senders, receivers], sizes * problem.ratio[receivers, senders]
    sent, received = np.zeros_like(load), np.zeros_like(load)
    sent[:, :-1] += forward
    sent[:, 1:] += backward
    received[:, 1:] += forward
    received[:, :-1] += backward
    return np.asarray(load * np.maximum(sent / problem.up[chains], received / problem.down[chains]))


def _sums(keys: Ints, shares: Ints) -> Floats:
    """For every key, the sum of the shares of the routes (rows) with that key."""
    _, index = np.unique(keys, return_inverse=True)
    index = index.reshape(keys.shape)
    weights = np.broadcast_to(shares[:, None], keys.shape).astype(np.float64)
    return np.asarray(np.bincount(index.ravel(), weights.ravel())[index])
