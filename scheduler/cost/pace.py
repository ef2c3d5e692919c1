"""The pace of every node, and a price made of paces alone: rough, but told in a fraction of the time of an estimate."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.keeping import chosen, first_need, is_first, room, update_seconds
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.sums import EXCHANGE, LATENCY, SLOWEST_LINK, SPEED, siblings_in
from dtfm.scheduler.model.tables import Tables

WAITING = 1.4
"""Factor on the time of a round trip, where few micro-batches in flight decide the pace: links and devices are busy with
others. With it, estimates of good plans for 32, 64 and 128 unequal nodes are neither too low nor too high: the median is within
3 % of the simulation."""

FREE = 1.1
"""Factor on the planned busy time of links: on a link that is busy for the whole step, micro-batches wait long."""


@entry()
def with_waiting(busy: float, round_trips: float) -> float:
    """Seconds that a node needs if it is busy for ``busy`` seconds, and if its micro-batches need ``round_trips`` seconds with
    as many in flight as it may have.

    About the longer of both, and more when they are nearly as long: then the node waits sometimes for the one, sometimes for
    the other.
    """
    return float(np.sqrt(np.sqrt(busy**4 + (WAITING * round_trips) ** 4)))


@entry()
def rough_seconds(t: Tables, sketch: Sketch, stages: int, cuts: Ints, limit: float, evenness: float) -> float:
    """Fills in forward, passes, alone and pace of the members, and returns roughly the seconds of a step.

    The result is the sum of three times: the slowest stage when its nodes share the micro-batches by pace, the slowest
    reduction, and one micro-batch's way through all stages and back. At first all links between two stages count together, as
    if flows could use all of them. If the seconds are then within the limit, links count one by one.

    The time is infinite when a stage has no links to its neighbours or no way through, or lacks a link among its nodes. The
    function gives up as soon as the seconds, plus ``evenness`` times the mean seconds of the stages and of their reductions,
    exceed ``limit``. Then it returns a number above ``limit``.

    Fills in levels and decides, unless it gives up or returns infinity.
    """
    trip, slowest_stage, slowest_reduction = 0.0, 0.0, 0.0
    stage_level, reduction_level = 0.0, 0.0
    pipeline, reducing = 0, 0
    for stage in range(stages - 1, -1, -1):
        rate, way, reduction = _stage(t, sketch, stages, stage, cuts, trip)
        if rate == 0.0:
            return np.inf
        trip = way
        seconds = t.micro_batches / rate
        stage_level += seconds / stages
        reduction_level += reduction / stages
        if seconds > slowest_stage:
            slowest_stage, pipeline = seconds, stage
        if reduction > slowest_reduction:
            slowest_reduction, reducing = reduction, stage
        price = slowest_stage + slowest_reduction + trip
        if price + evenness * (stage_level + reduction_level) > limit:
            return price + evenness * (stage_level + reduction_level)
    if stages > 1:
        stage_level, slowest_stage, pipeline = _beside_each_other(t, sketch, stages, cuts)
        if np.isinf(slowest_stage):
            return np.inf
        price = slowest_stage + slowest_reduction + trip
        if price + evenness * (stage_level + reduction_level) > limit:
            return float(price + evenness * (stage_level + reduction_level))
    sketch.levels[0], sketch.levels[1] = stage_level, reduction_level
    decides, slowest = sketch.decides, sketch.sums.slowest[sketch.sums.row[reducing]]
    first, past_last = sketch.stage[pipeline].first, sketch.stage[pipeline + 1].first
    decides[0], decides[1], decides[2] = sketch.members[np.random.randint(first, past_last)], -1, pipeline
    decides[3], decides[4], decides[5] = slowest.one, slowest.other, reducing
    return float(slowest_stage + slowest_reduction + trip)


@compiled()
def _stage(t: Tables, sketch: Sketch, stages: int, stage: int, cuts: Ints, onward: float) -> tuple[float, float, float]:
    """Fills in forward, passes, alone and pace of the stage's members.

    Returns the micro-batches per second that they compute together, the seconds of a micro-batch's way from here to the last
    stage and back, and the seconds of their reduction and slowest update. ``onward`` is the way from the stage behind.
    """
    first, past_last = sketch.stage[stage].first, sketch.stage[stage + 1].first
    members, sums = sketch.members, sketch.sums
    begin, end = t.layer[cuts[stage]], t.layer[cuts[stage + 1]]
    work = end.flops_before - begin.flops_before
    size_before = t.layer[cuts[stage] - 1].activation if stage > 0 else 0.0
    size_behind = t.layer[cuts[stage + 1] - 1].activation if stage < stages - 1 else 0.0
    before = sums.toward[sums.row[max(stage - 1, 0)]]
    behind = sums.toward[sums.row[min(stage + 1, stages - 1)]]
    peers_behind = sketch.stage[min(stage + 2, stages)].first - past_last
    cheapest = first_need(t, cuts[stage], cuts[stage + 1])
    fewest = float(min(t.least_held[stages, stage], t.micro_batches))
    rate, freely, ways, connection, update = 0.0, 0.0, 0.0, 0.0, 0.0
    for at in range(first, past_last):
        node = members[at]
        siblings, per_byte = siblings_in(t, sums, stage, node), max(t.node[node].per_up, t.node[node].per_down)
        forward = work / t.node[node].flops
        memory, host_memory, wanted = t.node[node].memory, t.node[node].host_memory, cheapest
        if not is_first(t.ways, cheapest, fewest, memory, host_memory):
            wanted = chosen(t, cheapest, cuts[stage], cuts[stage + 1], fewest, node)
        update = max(update, update_seconds(t, wanted, host_memory))
        both = wanted.passes * forward
        links, way = 0.0, both + onward
        if stage > 0:
            links = np.inf if before[SPEED, node] < SLOWEST_LINK else FREE * size_before / before[SPEED, node]
        if stage < stages - 1:
            links = max(
                links, np.inf if behind[SPEED, node] < SLOWEST_LINK else FREE * size_behind / behind[SPEED, node]
            )
            if behind[SPEED, node] >= SLOWEST_LINK:
                exchange = size_behind * behind[EXCHANGE, node] / behind[SPEED, node]
                way += exchange + behind[LATENCY, node] / peers_behind
        crossing = 0.0 if stage > 0 and siblings_in(t, sums, stage - 1, node) > 0 else size_before
        if stage == stages - 1 or siblings_in(t, sums, stage + 1, node) == 0:
            crossing += size_behind
        alone = max(both, (1 + siblings) * crossing * per_byte, 1e-30)
        pace = max(alone, links)
        freely += 1 / pace
        ways += way / pace
        if stage < stages - 1:
            depth = max(
                t.least_held[stages, stage], np.floor(room(wanted, memory, host_memory) / max(wanted.each, 1.0))
            )
            alone, pace = with_waiting(alone, way / depth), with_waiting(pace, way / depth)
        rate += 1 / pace
        sketch.node[node].forward, sketch.node[node].passes = forward, wanted.passes
        sketch.node[node].alone, sketch.node[node].pace = alone, pace
        connection = max(connection, (1 + siblings) * (past_last - first - 1 - siblings) * per_byte)
    replicas, slowest, reduction = past_last - first, sums.slowest[sums.row[stage]], 0.0
    if np.isinf(slowest.slowness):
        return 0.0, np.inf, np.inf
    if replicas > 1:
        gradients = end.gradients_before - begin.gradients_before
        reduction = 2 * gradients / replicas * max(slowest.slowness, connection)
        if slowest.one >= 0:
            one, other = slowest.one, slowest.other
            reduction += 2 * max(t.link[one, other].latency, t.link[other, one].latency)
    return rate, ways / max(freely, 1e-300), reduction + update


@compiled()
def _beside_each_other(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> tuple[float, float, int]:
    """Returns the mean seconds of the stages, the seconds of the slowest stage, and its number. Infinity when a stage has no
    way on.

    Links count one by one here: each carries at most as much as the nodes at both its ends compute.
    """
    members, toward, pace, there, back = sketch.members, t.toward, sketch.shards[0], sketch.shards[1], sketch.shards[2]
    first, count = sketch.stage, sketch.stage[stages].first
    for m in range(count):
        pace[m] = 1 / sketch.node[members[m]].pace
        there[m] = back[m] = 0.0
    for stage in range(stages - 1):
        size = max(FREE * t.layer[cuts[stage + 1] - 1].activation, 1e-30)
        for b in range(first[stage + 1].first, first[stage + 2].first):
            speeds = toward[members[b], SPEED]
            for a in range(first[stage].first, first[stage + 1].first):
                speed = speeds[members[a]] / size
                there[a] += min(speed, pace[b])
                back[b] += min(speed, pace[a])
    level, slowest, at = 0.0, 0.0, 0
    for stage in range(stages):
        rate = 0.0
        for m in range(first[stage].first, first[stage + 1].first):
            own = there[m] if stage == 0 else back[m] if stage == stages - 1 else min(there[m], back[m])
            rate += min(pace[m], own)
        if rate < 1e-30:
            return np.inf, np.inf, stage
        seconds = t.micro_batches / rate
        level += seconds / stages
        if seconds > slowest:
            slowest, at = seconds, stage
    return level, slowest, at
