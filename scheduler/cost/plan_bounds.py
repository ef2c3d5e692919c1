"""Lower bounds on the simulated time of plans of a small cluster: of one plan, and of any plan with a given stage."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables


@compiled
def plan_bound(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> float:
    """Lower bound on simulate's result, in seconds, given members, forward, load and flows. All links that they need exist.

    The pipeline takes at least the first micro-batch's shortest way to a stage, then everything that one device, connection or
    link of the stage must do without a pause, then the shortest way back. The same holds for the reduction of a stage's
    gradients, where gradients that are final before a node's last backward pass ends can hide behind it.

    Fills in arrival, homeward, trip, sent, received, and own: the earliest end of a node's last backward pass.
    """
    _shortest_ways(t, sketch, stages, cuts)
    bound = 0.0
    for stage in range(stages):
        for m in range(sketch.stage[stage].first, sketch.stage[stage + 1].first):
            node = sketch.members[m]
            forward, load = sketch.node[node].forward, sketch.node[node].load
            if load == 0:
                sketch.node[node].own = 2 * forward
                continue
            # When the first backward pass ends, all others remain.
            busy = max(3 * forward * load, sketch.node[node].trip + 2 * forward * (load - 1))
            sketch.node[node].own = sketch.node[node].arrival + busy
    for stage in range(stages - 1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b, count = sketch.edge[e].sender, sketch.edge[e].receiver, sketch.edge[e].count
            there, back = size * t.link[a, b].slowness, size * t.link[b, a].slowness
            whole = sketch.node[a].arrival + 3 * sketch.node[a].forward + sketch.node[b].trip + there + back
            whole += t.link[a, b].latency + t.link[b, a].latency
            sketch.node[a].own = max(sketch.node[a].own, whole + (count - 1) * max(there, back))
            sent = sketch.node[a].arrival + sketch.node[a].forward + count * there + t.link[a, b].latency
            sketch.node[b].own = max(sketch.node[b].own, sent + sketch.node[b].trip)
    for stage in range(stages):
        for m in range(sketch.stage[stage].first, sketch.stage[stage + 1].first):
            node = sketch.members[m]
            if sketch.node[node].load:
                bound = max(bound, sketch.node[node].own + sketch.node[node].homeward)
        bound = max(bound, _connections(t, sketch, stage, cuts))
        bound = max(bound, _reduction(t, sketch, stage, cuts))
    return bound * (1 - 1e-9)


@compiled
def _shortest_ways(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Fills in arrival, homeward, trip, sent and received, with a micro-batch's shortest way along the flows."""
    for m in range(sketch.stage[stages].first):
        node = sketch.members[m]
        first = m < sketch.stage[1].first
        sketch.node[node].arrival = 0.0 if first else np.inf
        sketch.node[node].homeward = 0.0 if first else np.inf
        sketch.node[node].trip = 3 * sketch.node[node].forward if m >= sketch.stage[stages - 1].first else np.inf
        sketch.node[node].sent = sketch.node[node].received = 0.0
    for stage in range(stages - 1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b, count = sketch.edge[e].sender, sketch.edge[e].receiver, sketch.edge[e].count
            there = t.link[a, b].latency + size * t.link[a, b].slowness
            back = t.link[b, a].latency + size * t.link[b, a].slowness
            forward = sketch.node[a].forward
            sketch.node[b].arrival = min(sketch.node[b].arrival, sketch.node[a].arrival + forward + there)
            sketch.node[b].homeward = min(sketch.node[b].homeward, back + 2 * forward + sketch.node[a].homeward)
            onward, returned = count * size * t.link[a, b].ratio, count * size * t.link[b, a].ratio
            sketch.node[a].sent += onward
            sketch.node[b].received += onward
            sketch.node[b].sent += returned
            sketch.node[a].received += returned
    for stage in range(stages - 2, -1, -1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b = sketch.edge[e].sender, sketch.edge[e].receiver
            both = t.link[a, b].latency + t.link[b, a].latency + size * (t.link[a, b].slowness + t.link[b, a].slowness)
            trip = 3 * sketch.node[a].forward + both + sketch.node[b].trip
            sketch.node[a].trip = min(sketch.node[a].trip, trip)


@compiled
def _connections(t: Tables, sketch: Sketch, stage: int, cuts: Ints) -> float:
    """The earliest end of everything that a node of the stage sends, or receives, shards of gradients included."""
    members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
    size = t.layer[cuts[stage + 1]].gradients_before - t.layer[cuts[stage]].gradients_before
    shard = size / len(members)
    longest = 0.0
    for a in members:
        if sketch.node[a].load == 0:
            continue
        sent, received, begun = sketch.node[a].sent, sketch.node[a].received, 0.0
        for b in members:
            if a != b:
                sent += 2 * shard * t.link[a, b].ratio
                received += 2 * shard * t.link[b, a].ratio
        if stage > 0:  # nobody sends it anything before it has itself got the first micro-batch and computed that
            begun = np.inf
            for e in range(sketch.stage[stage - 1].begin, sketch.stage[stage].begin):
                if sketch.edge[e].receiver == a:
                    sender = sketch.edge[e].sender
                    begun = min(begun, sketch.node[sender].arrival + sketch.node[sender].forward)
        # Shards of a replica that was done long before may come first.
        into = 0.0 if len(members) > 1 else begun
        out = sketch.node[a].arrival + sketch.node[a].forward
        longest = max(longest, out + sent * t.node[a].per_up, into + received * t.node[a].per_down)
        before = begun + sketch.node[a].received * t.node[a].per_down
        longest = max(longest, before + 2 * sketch.node[a].forward + sketch.node[a].homeward)
    return longest


@compiled
def _reduction(t: Tables, sketch: Sketch, stage: int, cuts: Ints) -> float:
    """The earliest end of a stage's reduction, given the earliest end of each node's last backward pass."""
    members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
    longest = 0.0
    for node in members:
        after = reduced_after(t, members, node, cuts[stage], cuts[stage + 1], sketch.node[node].forward)
        longest = max(longest, sketch.node[node].own + after)
    return longest


@compiled
def reduced_after(t: Tables, members: Ints, node: int, layer: int, past_last: int, forward: float) -> float:
    """The least seconds from the end of a node's last backward pass to the end of the reduction of layers [layer, past_last).

    Negative when all can hide behind that pass. ``forward`` is the node's seconds for a forward pass.
    """
    if len(members) == 1:
        return 0.0
    shard = (t.layer[past_last].gradients_before - t.layer[layer].gradients_before) / len(members)
    last = (t.layer[layer + 1].gradients_before - t.layer[layer].gradients_before) / len(members)
    longest = -2 * forward
    for owner in members:
        if owner == node:
            continue
        # Each link carries a shard there for the owner, and later the sender's own sum.
        carried = 2 * shard * t.link[node, owner].slowness + t.link[node, owner].latency
        longest = max(longest, carried - 2 * forward)
        # A node's last gradients go to every owner, and their sums from there to all other nodes.
        hop = last * t.link[node, owner].slowness + t.link[node, owner].latency
        onward = 0.0
        for other in members:
            if other != owner:
                onward = max(onward, last * t.link[owner, other].slowness + t.link[owner, other].latency)
        longest = max(longest, hop + onward)
    return longest


@compiled
def soonest(pace: Floats, after: Floats, total: int, least: int) -> float:
    """The least time by which nodes can be done with ``total`` micro-batches, however these are divided.

    A node with n of them, ``least`` or more, is done after n * pace + after seconds; one with none of them is done at once.
    Infinite when there are too few micro-batches. pace and after are float64 [nodes]. Within a part in 1e9 below the exact time.
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


@compiled
def crowding(t: Tables, senders: Ints, receivers: Ints) -> float:
    """The least seconds per byte by which all micro-batches of a step take longer over a boundary than the first, there and back.

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
                    if c != d:
                        each = max(each, t.link[c, d].ratio * max(t.node[c].per_up, t.node[d].per_down))
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


@compiled
def _passing(t: Tables, side: Ints, other: Ints, there: float, back: float) -> float:
    """The most micro-batches, of a byte each, that one side exchanges with the other in the given seconds each way."""
    total = 0.0
    for a in side:
        passing, ratio_there, ratio_back = 0.0, np.inf, np.inf
        for b in other:
            slowness, slowness_back = t.link[a, b].slowness, t.link[b, a].slowness
            if not np.isfinite(slowness + slowness_back):
                continue
            ratio_there, ratio_back = min(ratio_there, t.link[a, b].ratio), min(ratio_back, t.link[b, a].ratio)
            number = min(there / max(slowness, 1e-300), back / max(slowness_back, 1e-300))
            passing += np.floor(number * (1 + 1e-9))
        if passing > 0:
            number = min(there / (ratio_there * t.node[a].per_up), back / (ratio_back * t.node[a].per_down))
            total += min(passing, np.floor(number * (1 + 1e-9)))
    return total
