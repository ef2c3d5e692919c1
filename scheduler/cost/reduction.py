"""How long a stage's replicas take to reduce their gradients."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables

EXACT_GROUP = 48
"""Largest number of replicas whose reduction is followed link by link: the number of messages grows with its square."""


@compiled
def reduced(t: Tables, sketch: Sketch, stage: int, layer: int, past_last: int) -> tuple[float, int, int]:
    """When the gradients of a stage with layers [layer, past_last) are reduced, in seconds from the start of the step.

    Also the two nodes whose link decides that; -1 stands for nobody.

    Each replica owns a shard: reduce-scatter, then all-gather. A node's last backward pass ends at ``end``; before it, most
    gradients are final. Every link carries a shard to its owner and, once the last node's gradients are final, the same amount of
    sums; the last layer's gradients go forward and back alone.
    """
    members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
    count = len(members)
    last = members[0]
    for node in members:
        if sketch.node[node].end > sketch.node[last].end:
            last = node
    if count == 1:
        return sketch.node[last].end, last, -1
    layers = past_last - layer
    size = t.layer[past_last].gradients_before - t.layer[layer].gradients_before
    hidden = 1 - 1 / layers
    if count > EXACT_GROUP:
        slowest, latency, a, b = slowest_link(t, members)
        least = np.inf
        for node in members:
            least = min(least, (sketch.node[node].passes - 1) * sketch.node[node].forward * hidden)
        transfer = 2 * size / count * slowest
        return sketch.node[last].end + max(transfer - least, transfer / layers) + 2 * latency, a, b
    shard = size / count
    tail = shard / layers
    out, into, summed, early = sketch.shards[0], sketch.shards[1], sketch.shards[2], sketch.shards[3]
    relays = sketch.shards[4]
    if t.relayed > 0:
        _share_relays(t, members, relays)
    for i in range(count):
        a = members[i]
        out[i], into[i], summed[i] = (count - 1) * t.node[a].per_up, (count - 1) * t.node[a].per_down, 0.0
    begun_last = sketch.node[last].end - (sketch.node[last].passes - 1) * sketch.node[last].forward * hidden
    for i in range(count):
        a = members[i]
        end = sketch.node[a].end
        begun = end - (sketch.node[a].passes - 1) * sketch.node[a].forward * hidden
        early[i] = begun_last
        for j in range(count):
            b = members[j]
            link = 0.0 if i == j else max(t.link[a, b].slowness, out[i], into[j])
            if t.relayed > 0 and t.link[a, b].via >= 0:
                link = max(link, relays[t.link[a, b].via])
            there = begun + shard * link
            early[i] = max(early[i], there)
            summed[j] = max(summed[j], max(there, end + tail * link) + t.link[a, b].latency)
    done, one, other = 0.0, -1, -1
    for i in range(count):
        a = members[i]
        for j in range(count):
            b = members[j]
            link = 0.0 if i == j else max(t.link[a, b].slowness, out[i], into[j])
            if t.relayed > 0 and t.link[a, b].via >= 0:
                link = max(link, relays[t.link[a, b].via])
            gathered = max(early[i] + shard * link, summed[i] + tail * link) + t.link[a, b].latency
            if gathered > done:
                done, one, other = gathered, a, b
    return done, one, other


@compiled
def _share_relays(t: Tables, members: Ints, relays: Floats) -> None:
    """Fills in, by row of Tables.node, the seconds for which a relay is busy when each of the members whom it serves sends a byte
    of a shard to each other. ``relays`` is float64 [rows]."""
    relays[:] = 0.0
    for a in members:
        for b in members:
            via = t.link[a, b].via
            if via >= 0:
                relays[via] += max(t.node[via].per_up, t.node[via].per_down)


@compiled
def slowest_link(t: Tables, members: Ints) -> tuple[float, float, int, int]:
    """The seconds per byte of a shard over the slowest link, connection or relay among the members, the longest latency, and the
    two nodes of the slowest link (the second is -1 where it is a connection)."""
    slowest, latency, a, b = 0.0, 0.0, members[0], -1
    relays = np.zeros(len(t.node) if t.relayed > 0 else 0)
    if t.relayed > 0:
        _share_relays(t, members, relays)
    for node in members:
        for peer in members:
            if peer == node:
                continue
            link = t.link[node, peer].slowness
            if t.relayed > 0 and t.link[node, peer].via >= 0:
                link = max(link, relays[t.link[node, peer].via])
            if link > slowest:
                slowest, a, b = link, node, peer
            latency = max(latency, t.link[node, peer].latency)
        own = (len(members) - 1) * max(t.node[node].per_up, t.node[node].per_down)
        if own > slowest:
            slowest, a, b = own, node, -1
    return slowest, latency, a, b


@compiled
def reduction_seconds(t: Tables, members: Ints, gradient_bytes: float) -> float:
    """Seconds to reduce a stage's gradients (arXiv 2206.01288, section 3.2), when all members are done at the same time.

    A node sends to all others at once, so the transfer takes as long as the slowest link, or as the slowest connection needs to
    send or receive one shard per other replica.
    """
    replicas = len(members)
    if replicas == 1:
        return 0.0
    slowest, latency, _, _ = slowest_link(t, members)
    return 2 * (gradient_bytes / replicas) * slowest + 2 * latency
