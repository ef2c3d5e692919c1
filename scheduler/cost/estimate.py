"""A fast estimate of the seconds per step, from members, loads and flows."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.cost.in_flight import SLACK, depth_of
from dtfm.scheduler.cost.pace import with_waiting
from dtfm.scheduler.cost.reduction import add_up_shards, reduced
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.keeping import chosen, first_need, is_first, room, update_seconds
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables


@compiled()
def estimated_seconds(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> float:
    """Seconds for one step, given members, loads and flows. All links that they need exist.

    A resource is a device, one direction of a link, or one direction of a line with all its traffic. For each resource the step
    takes at least the sum of three times: the first micro-batch's way to the resource, the resource's whole load, and the last
    micro-batch's way from the resource back to the first stage. A node that holds few micro-batches in flight completes at most
    that number per round trip. A delay of a node delays the nodes that it feeds. Then every stage reduces its gradients link by
    link, the last stages earlier than the first. The slowest update of state in a host's memory follows.

    Fills in the times of the sketch and its ``decides``.
    """
    _ways_forward(t, sketch, stages, cuts)
    busiest = _ways_back(t, sketch, stages, cuts)
    top, node, update = _alone(t, sketch, stages, cuts, busiest)
    node, peer = _links(t, sketch, stages, cuts, top, node)
    _late_for_each_other(t, sketch, stages, cuts)
    stage = 0
    while node not in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
        stage += 1
    decides = sketch.decides
    decides[0], decides[1], decides[2] = node, peer, stage
    decides[3], decides[4], decides[5] = node, peer, stage
    finished = 0.0
    for node in sketch.members[: sketch.stage[1].first]:
        finished = max(finished, sketch.node[node].end)
    sketch.levels[0], sketch.levels[1] = 0.0, 0.0
    add_up_shards(t, sketch, stages, cuts)
    for stage in range(stages):
        slowest = 0.0
        for node in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
            slowest = max(slowest, sketch.node[node].own + sketch.node[node].homeward)
        done, a, b = reduced(t, sketch, stage, cuts[stage], cuts[stage + 1])
        sketch.levels[0] += slowest / stages
        sketch.levels[1] += max(done - slowest, 0.0) / stages
        if done > finished:
            finished = done
            decides[3], decides[4], decides[5] = a, b, stage
    return finished + update


@compiled()
def _ways_forward(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Fills in arrival, homeward, sent and received. A micro-batch's way home is a mean over the links, by their flows."""
    for m in range(sketch.stage[stages].first):
        node = sketch.members[m]
        sketch.node[node].arrival = 0.0 if m < sketch.stage[1].first else np.inf
        sketch.node[node].homeward = 0.0
    for row in range(len(t.node)):
        sketch.node[row].sent = sketch.node[row].received = 0.0
    for stage in range(stages - 1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b, count = sketch.edge[e].sender, sketch.edge[e].receiver, sketch.edge[e].count
            there = t.link[a, b].latency + size * t.link[a, b].slowness
            back = t.link[b, a].latency + size * t.link[b, a].slowness
            sketch.node[b].arrival = min(
                sketch.node[b].arrival, sketch.node[a].arrival + sketch.node[a].forward + there
            )
            sketch.node[b].homeward += (
                count
                * (back + (sketch.node[a].passes - 1) * sketch.node[a].forward + sketch.node[a].homeward)
                / sketch.node[b].load
            )
            _carry(t, sketch, a, b, count * size)
            _carry(t, sketch, b, a, count * size)


@compiled()
def _carry(t: Tables, sketch: Sketch, a: int, b: int, carried: float) -> None:
    """Adds what goes from a to b to the traffic of the lines on its way."""
    sender, receiver = t.node[a].line, t.node[b].line
    if sender == receiver:
        return
    sketch.node[sender].sent += carried
    sketch.node[receiver].received += carried
    via = t.link[a, b].via
    if via >= 0:
        sketch.node[via].sent += carried
        sketch.node[via].received += carried


@compiled()
def _relay_busy(t: Tables, sketch: Sketch, a: int, b: int) -> float:
    """Seconds of a step during which the relay between a and b keeps its line busy; 0 if the link is direct."""
    via = t.link[a, b].via
    return _line_busy(t, sketch, via) if via >= 0 else 0.0


@compiled()
def _line_busy(t: Tables, sketch: Sketch, row: int) -> float:
    """Seconds of a step during which the line is busy."""
    return float(max(sketch.node[row].sent * t.node[row].per_up, sketch.node[row].received * t.node[row].per_down))


@compiled()
def _ways_back(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> float:
    """Fills in trip and longest_trip, and returns the seconds that the busiest device computes."""
    busiest = 1e-12
    for stage in range(stages - 1, -1, -1):
        for m in range(sketch.stage[stage].first, sketch.stage[stage + 1].first):
            node = sketch.members[m]
            alone = sketch.node[node].passes * sketch.node[node].forward
            sketch.node[node].trip = sketch.node[node].longest_trip = alone
            busiest = max(busiest, alone * sketch.node[node].load)
        if stage == stages - 1:
            continue
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b, count = sketch.edge[e].sender, sketch.edge[e].receiver, sketch.edge[e].count
            both = t.link[a, b].latency + t.link[b, a].latency + size * (t.link[a, b].slowness + t.link[b, a].slowness)
            sketch.node[a].trip += count * (both + sketch.node[b].trip) / sketch.node[a].load
            longest = sketch.node[a].passes * sketch.node[a].forward + SLACK * both + sketch.node[b].longest_trip
            sketch.node[a].longest_trip = max(sketch.node[a].longest_trip, longest)
    return busiest


@compiled()
def _alone(t: Tables, sketch: Sketch, stages: int, cuts: Ints, busiest: float) -> tuple[float, int, float]:
    """Fills in own, and returns when the last micro-batch of the latest node is home, that node, and the seconds of the slowest
    update (keeping.update_seconds)."""
    top, at, update = -1.0, -1, 0.0
    for stage in range(stages):
        cheapest = first_need(t, cuts[stage], cuts[stage + 1])
        fewest = float(min(t.least_held[stages, stage], t.micro_batches))
        for m in range(sketch.stage[stage].first, sketch.stage[stage + 1].first):
            node = sketch.members[m]
            load = float(sketch.node[node].load)
            started = sketch.node[node].longest_trip * load / busiest
            memory, host_memory, wanted = t.node[node].memory, t.node[node].host_memory, cheapest
            if not is_first(t.ways, cheapest, fewest, memory, host_memory):
                wanted = chosen(t, cheapest, cuts[stage], cuts[stage + 1], fewest, node)
            update = max(update, update_seconds(t, wanted, host_memory))
            free = room(wanted, memory, host_memory)
            depth = float(depth_of(stages, stage, started, free / max(wanted.each, 1.0), t.micro_batches))
            sketch.node[node].own = 0.0
            if load == 0:
                continue
            busy = wanted.passes * sketch.node[node].forward * load
            # When the first is back, all other backward passes remain, and the forward passes that the depth did not allow.
            after = (wanted.passes - 1) * (load - 1) + max(load - depth, 0.0)
            busy = max(busy, sketch.node[node].trip + sketch.node[node].forward * after)
            busy = max(busy, _line_busy(t, sketch, t.node[node].line))
            if stage < stages - 1 and depth < load:
                busy = with_waiting(busy, sketch.node[node].trip * load / depth)
            sketch.node[node].own = sketch.node[node].arrival + busy
            if sketch.node[node].own + sketch.node[node].homeward > top:
                top, at = sketch.node[node].own + sketch.node[node].homeward, node
    return top, at, update


@compiled()
def _links(t: Tables, sketch: Sketch, stages: int, cuts: Ints, top: float, at: int) -> tuple[int, int]:
    """Raises own to the time when the node's slowest link, or relay, is done.

    Returns the latest node and the node at the other end of the link that makes it late, or -1. The latest node is ``at``
    unless a link makes another node later than ``top``.
    """
    peer = -1
    for stage in range(stages - 1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b = sketch.edge[e].sender, sketch.edge[e].receiver
            each = size * max(t.link[a, b].slowness, t.link[b, a].slowness)
            busy = each * (sketch.edge[e].count - 1)
            if t.relayed > 0:
                busy = max(busy, _relay_busy(t, sketch, a, b), _relay_busy(t, sketch, b, a))
            done = sketch.node[a].arrival + sketch.node[a].trip + busy
            if done > sketch.node[a].own:
                sketch.node[a].own = done
                if done + sketch.node[a].homeward > top:
                    top, at, peer = done + sketch.node[a].homeward, a, b
    return at, peer


@compiled()
def _late_for_each_other(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Fills in end: when each node ends its last backward pass.

    A node ends after the nodes that send it gradients. A node that receives micro-batches ends after their sender has sent the
    last one. A node's own micro-batches are spread evenly over the micro-batches of its stage."""
    for m in range(sketch.stage[stages].first):
        sketch.node[sketch.members[m]].end = sketch.node[sketch.members[m]].own
    for stage in range(stages - 1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b = sketch.edge[e].sender, sketch.edge[e].receiver
            back = t.link[b, a].latency + size * t.link[b, a].slowness
            backward = (sketch.node[a].passes - 1) * sketch.node[a].forward
            sketch.node[b].end = max(sketch.node[b].end, sketch.node[a].end - back - backward)
    for stage in range(stages - 2, -1, -1):
        size = t.layer[cuts[stage + 1] - 1].activation
        for e in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            a, b = sketch.edge[e].sender, sketch.edge[e].receiver
            back = t.link[b, a].latency + size * t.link[b, a].slowness
            backward = (sketch.node[a].passes - 1) * sketch.node[a].forward
            sketch.node[a].end = max(sketch.node[a].end, sketch.node[b].end + back + backward)
    finished = 0.0
    for node in sketch.members[: sketch.stage[1].first]:
        finished = max(finished, sketch.node[node].end)
    for m in range(sketch.stage[stages].first):
        node = sketch.members[m]
        load, begun = sketch.node[node].load, sketch.node[node].arrival
        if load > 0:
            last = begun + (finished - sketch.node[node].homeward - begun) * (load - 1.0) / load
            sketch.node[node].end = max(sketch.node[node].end, last)
