"""Lower bounds on the simulated time of any plan with a given stage, or with two given stages side by side."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Floats, Ints, Problem
from dtfm.scheduler.model.tables import Tables

AS_GOOD = 1.005
"""A plan that takes at most this many times the bound is as good as any."""


@entry()
def reduced_after(t: Tables, members: Ints, node: int, layer: int, past_last: int, forward: float) -> float:
    """The least seconds from the end of a node's last backward pass to the end of the reduction of layers [layer, past_last).

    Negative when all can hide behind that pass. ``forward`` is the node's seconds for a forward pass.
    """
    if len(members) == 1:
        return 0.0
    shard = (t.layer[past_last].gradients_before - t.layer[layer].gradients_before) / len(members)
    last = (t.layer[layer + 1].gradients_before - t.layer[layer].gradients_before) / len(members)
    backward = (t.passes - 1) * forward
    longest = -backward
    for owner in members:
        if owner == node:
            continue
        # Each link carries a shard there for the owner, and later the sender's own sum.
        carried = 2 * shard * t.link[node, owner].slowness + t.link[node, owner].latency
        longest = max(longest, carried - backward)
        # A node's last gradients go to every owner, and their sums from there to all other nodes.
        hop = last * t.link[node, owner].slowness + t.link[node, owner].latency
        onward = 0.0
        for other in members:
            if other != owner:
                onward = max(onward, last * t.link[owner, other].slowness + t.link[owner, other].latency)
        longest = max(longest, hop + onward)
    return longest


@entry()
def soonest(pace: Floats, after: Floats, total: int, least: int) -> float:
    """The earliest time when nodes can be done with ``total`` micro-batches, however the nodes divide them.

    A node with n micro-batches, ``least`` or more, is done after n * pace + after seconds. A node without any is done
    immediately. Infinite when there are too few micro-batches. pace and after are float64 [nodes]. Within a part in 1e9 below
    the exact time.
    """
    if len(pace) * least > total:
        return np.inf
    low, high = 0.0, np.inf
    for node in range(len(pace)):
        high = min(high, max(total * pace[node], 0.0) + max(after[node], 0.0))
        if least:
            low = max(low, pace[node] * least + after[node])
    if least:
        for node in range(len(pace)):
            high = max(high, max(total * pace[node], 0.0) + max(after[node], 0.0))
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        given = 0.0
        for node in range(len(pace)):
            most = max(middle - after[node], 0.0) / max(pace[node], 1e-300) * (1 + 1e-12)
            given += min(max(np.floor(most), float(least)), float(total))
        if given >= total:
            high = middle
        else:
            low = middle
    return low


@entry()
def crowding(t: Tables, senders: Ints, receivers: Ints) -> float:
    """The least extra seconds, per byte, that all micro-batches of a step take over a boundary, there and back, beyond the
    first one.

    Counts whole micro-batches: on each link, there and back, and on each connection, up and down. Infinite without links.
    """
    there, back, low, high = np.inf, np.inf, 0.0, np.inf
    for a in senders:
        for b in receivers:
            there, back = min(there, t.link[a, b].slowness), min(back, t.link[b, a].slowness)
    for a in senders:
        for b in receivers:
            one = max(t.link[a, b].slowness - there, t.link[b, a].slowness - back)
            each = max(t.link[a, b].slowness, t.link[b, a].slowness)
            for c in (a, b):
                for d in (a, b):
                    if t.node[c].line != t.node[d].line:
                        each = max(each, t.node[c].per_up, t.node[d].per_down)
            if np.isfinite(one):
                high = min(high, one + t.micro_batches * each)
    if np.isinf(high):
        return high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        sent = _passing(t, senders, receivers, middle + there, middle + back)
        if min(sent, _passing(t, receivers, senders, middle + back, middle + there)) >= t.micro_batches:
            high = middle
        else:
            low = middle
    return low


@compiled()
def _passing(t: Tables, side: Ints, other: Ints, there: float, back: float) -> float:
    """The most micro-batches, of a byte each, that one side exchanges with the other in the given seconds each way."""
    total = 0.0
    for a in side:
        passing, crossing = 0.0, True
        for b in other:
            crossing &= t.node[a].line != t.node[b].line
            slowness, slowness_back = t.link[a, b].slowness, t.link[b, a].slowness
            if not np.isfinite(slowness + slowness_back):
                continue
            number = min(there / max(slowness, 1e-300), back / max(slowness_back, 1e-300))
            passing += np.floor(number * (1 + 1e-9))
        if passing > 0:
            number = min(there / t.node[a].per_up, back / t.node[a].per_down)
            total += min(passing, np.floor(number * (1 + 1e-9))) if crossing else passing
    return total


def work_bound(problem: Problem) -> float:
    """A lower bound on the seconds per step of any plan, from the devices alone. Certified: all devices share all work without a
    pause, and one micro-batch passes through the fastest device."""
    forward, flops = float(np.sum([layer.forward_flops for layer in problem.workload.layers])), problem.flops
    work = problem.workload.passes * forward
    bound = max(work * problem.workload.micro_batches / float(flops.sum()), work / float(flops.max()))
    return bound * (1.0 - 1e-12)  # margin for rounding: others add up the same terms in another order
