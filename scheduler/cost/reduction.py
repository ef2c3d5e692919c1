"""How long a stage's replicas take to reduce their gradients."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.sums import siblings_in
from dtfm.scheduler.model.tables import Tables

EXACT_GROUP = 48
"""Largest number of replicas whose reduction is followed link by link: the number of messages grows with its square."""


@compiled()
def add_up_shards(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Fills in the shards of all lines."""
    for row in range(len(t.node)):
        sketch.node[row].shards = 0.0
    for stage in range(stages):
        members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
        count = len(members)
        shard = (t.layer[cuts[stage + 1]].gradients_before - t.layer[cuts[stage]].gradients_before) / count
        for a in members:
            sketch.node[t.node[a].line].shards += shard * (count - 1 - siblings_in(t, sketch.sums, stage, a))
            if t.relayed > 0 and count <= EXACT_GROUP:
                for b in members:
                    if t.link[a, b].via >= 0:
                        sketch.node[t.link[a, b].via].shards += shard


@compiled()
def reduced(t: Tables, sketch: Sketch, stage: int, layer: int, past_last: int) -> tuple[float, int, int]:
    """When the gradients of a stage with layers [layer, past_last) are reduced, in seconds from the start of the step.

    Also returns the two nodes whose link decides the time; -1 stands for nobody.

    Each replica owns a shard: reduce-scatter, then all-gather. A node's last backward pass ends at ``end``; before then, most
    gradients are final. Every link carries a shard to its owner. When the last node's gradients are final, the link carries the
    same amount of sums. The last layer's gradients go forward and back alone. Lines are shared with the reductions of all
    stages.
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
    shared = t.relayed > 0 or len(t.node) > len(t.link)
    for i in range(count):
        a = members[i]
        crossing = sketch.node[t.node[a].line].shards / max(shard, 1e-300)
        out[i], into[i], summed[i] = crossing * t.node[a].per_up, crossing * t.node[a].per_down, 0.0
    begun_last = sketch.node[last].end - (sketch.node[last].passes - 1) * sketch.node[last].forward * hidden
    for i in range(count):
        a = members[i]
        end = sketch.node[a].end
        begun = end - (sketch.node[a].passes - 1) * sketch.node[a].forward * hidden
        early[i] = begun_last
        for j in range(count):
            b = members[j]
            link = 0.0 if i == j else max(t.link[a, b].slowness, out[i], into[j])
            if shared:
                link = _seconds_per_byte(t, sketch, a, b, link, shard)
            there = begun + shard * link
            early[i] = max(early[i], there)
            summed[j] = max(summed[j], max(there, end + tail * link) + t.link[a, b].latency)
    done, one, other = 0.0, -1, -1
    for i in range(count):
        a = members[i]
        for j in range(count):
            b = members[j]
            link = 0.0 if i == j else max(t.link[a, b].slowness, out[i], into[j])
            if shared:
                link = _seconds_per_byte(t, sketch, a, b, link, shard)
            gathered = max(early[i] + shard * link, summed[i] + tail * link) + t.link[a, b].latency
            if gathered > done:
                done, one, other = gathered, a, b
    return done, one, other


@compiled()
def _seconds_per_byte(t: Tables, sketch: Sketch, a: int, b: int, seconds: float, shard: float) -> float:
    """Seconds per byte of a shard from a to b, where lines are shared: ``seconds`` if it goes to another machine without a
    relay."""
    via = t.link[a, b].via
    if t.node[a].line == t.node[b].line:
        return float(t.link[a, b].slowness)
    if via < 0:
        return seconds
    passing = sketch.node[via].shards / max(shard, 1e-300) * max(t.node[via].per_up, t.node[via].per_down)
    return float(max(seconds, passing))


@compiled(makes_arrays=True)
def slowest_link(t: Tables, members: Ints) -> tuple[float, float, int, int]:
    """Finds the slowest link or line among the members. Returns its seconds per byte of a shard, the longest latency, and the
    two nodes of the slowest link. The second node is -1 if a line is the slowest."""
    slowest, latency, a, b = 0.0, 0.0, members[0], -1
    shards = np.zeros(len(t.node))  # that each line sends, and receives
    for node in members:
        for peer in members:
            if t.node[node].line != t.node[peer].line:
                shards[t.node[node].line] += 1
            if t.link[node, peer].via >= 0:
                shards[t.link[node, peer].via] += 1
    for node in members:
        for peer in members:
            if peer == node:
                continue
            link, via = t.link[node, peer].slowness, t.link[node, peer].via
            if via >= 0:
                link = max(link, shards[via] * max(t.node[via].per_up, t.node[via].per_down))
            if link > slowest:
                slowest, a, b = link, node, peer
            latency = max(latency, t.link[node, peer].latency)
        own = shards[t.node[node].line] * max(t.node[node].per_up, t.node[node].per_down)
        if own > slowest:
            slowest, a, b = own, node, -1
    return slowest, latency, a, b


@entry()
def reduction_seconds(t: Tables, members: Ints, gradient_bytes: float) -> float:
    """Seconds to reduce a stage's gradients (arXiv 2206.01288, section 3.2), when all members are done at the same time.

    A node sends to all others at once, so the transfer takes as long as the slowest link, or as the slowest line needs to
    send or receive its shards.
    """
    replicas = len(members)
    if replicas == 1:
        return 0.0
    slowest, latency, _, _ = slowest_link(t, members)
    return 2 * (gradient_bytes / replicas) * slowest + 2 * latency
