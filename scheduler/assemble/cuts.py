"""Where the model is cut into stages, given the group of nodes that holds each."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.cost.pace import FREE
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.keeping import ENOUGH, every_need, first_need, lacking
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.sums import SLOWEST_LINK, SPEED, siblings_in
from dtfm.scheduler.model.tables import Tables

FASTER = 1.6
"""Factor between the first times that are tried for the pipeline; 1.05 where these come near."""
PIPELINES = 6
"""Number of pipeline times to try, 1.07 apart, after the first one in which all layers fit."""
HALVINGS = 10
"""Number of halvings of the time for the reductions."""


@entry()
def cut_model(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> bool:
    """Sets good cuts for the sketch's members and sums, within every node's memory.

    Returns False and leaves ``cuts`` unchanged if no cuts fit.

    A step's time is estimated as two parts: the seconds that the busiest stage needs for all micro-batches, and the seconds of
    the slowest reduction. When both are given, each stage takes as many layers as possible from the front, which leaves the
    fewest to the rest. So one pass over the layers tells whether all fit. For several times of the pipeline, a bisection finds
    the least time of the reductions; the best sum wins. Links count only by how much they let a node compute.
    """
    layers, usual = len(t.layer) - 1, t.ways == 1
    if stages > layers:
        return False
    speed = _survey(t, sketch, stages)
    seconds = t.passes * t.layer[layers].flops_before * t.micro_batches / speed
    most, step, best, fitting = 1e6 * seconds, FASTER, np.inf, 0
    while fitting < PIPELINES and seconds < min(most, best):
        for stage in range(stages):
            sketch.stage[stage].work = _most_work(t, sketch, stage, seconds)
            sketch.stage[stage].gradients = np.inf
        if not (_fill_usually(t, sketch, stages) if usual else _fill_in_any_way(t, sketch, stages)):
            seconds *= step
            continue
        if step == FASTER:
            seconds, step = seconds / FASTER, 1.05
            continue
        high = 0.0
        for stage in range(stages):
            size = (
                t.layer[sketch.stage[stage + 1].cut].gradients_before
                - t.layer[sketch.stage[stage].cut].gradients_before
            )
            high = max(high, sketch.stage[stage].slowness * size)
        low = 0.0
        if seconds + high < best:
            best = seconds + high
            _take(sketch, stages, cuts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if seconds + low >= best or high == 0.0:
                break
            for stage in range(stages):
                sketch.stage[stage].gradients = (
                    middle / sketch.stage[stage].slowness if sketch.stage[stage].slowness > 0 else np.inf
                )
            if _fill_usually(t, sketch, stages) if usual else _fill_in_any_way(t, sketch, stages):
                high = middle
                if seconds + high < best:
                    best = seconds + high
                    _take(sketch, stages, cuts)
            else:
                low = middle
        fitting += 1
        seconds *= 1.07
    # Taking as many layers as possible from the front may leave a stage one that it has no room for.
    return best < np.inf or _fit(t, sketch, stages, 0.0, cuts)


@compiled()
def _take(sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Copies the cuts that were tried."""
    for stage in range(stages + 1):
        cuts[stage] = sketch.stage[stage].cut


@compiled()
def _survey(t: Tables, sketch: Sketch, stages: int) -> float:
    """Fills in the least memory of each stage, the seconds that it takes to reduce a byte, and what each member's links and
    connection need per micro-batch (as ``own``). Returns the FLOP/s of all members."""
    speed, size, sums = 0.0, t.layer[len(t.layer) // 2].activation, sketch.sums
    for stage in range(stages):
        sketch.stage[stage].memory = np.inf
        slowness = sums.slowest[sums.row[stage]].slowness
        members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
        for node in members:
            speed += t.node[node].flops
            sketch.stage[stage].memory = min(sketch.stage[stage].memory, t.node[node].memory)
            siblings = siblings_in(t, sums, stage, node)
            connection = (1 + siblings) * max(t.node[node].per_up, t.node[node].per_down)
            sketch.node[node].own = 0.0
            sides = 0
            for beside in (stage - 1, stage + 1):
                if 0 <= beside < stages:
                    sides += siblings_in(t, sums, beside, node) == 0
                    toward = sums.toward[sums.row[beside]]
                    if toward[SPEED, node] >= SLOWEST_LINK:
                        sketch.node[node].own = max(sketch.node[node].own, FREE * size / toward[SPEED, node])
            sketch.node[node].own = max(sketch.node[node].own, sides * size * connection)
            slowness = max(slowness, (len(members) - 1 - siblings) * connection)
        sketch.stage[stage].slowness = 2 * slowness / len(members)
    return speed


@compiled()
def _most_work(t: Tables, sketch: Sketch, stage: int, seconds: float) -> float:
    """The most FLOPs that a stage's forward pass may have if its members are to compute all micro-batches in ``seconds``.

    A member whose links take longer than its device computes as much as its links carry. The others share the rest by speed.
    """
    members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
    most = np.inf
    while True:
        speed, carried = 0.0, 0.0
        for node in members:
            own = sketch.node[node].own
            if t.passes * most <= own * t.node[node].flops and own > 0:
                carried += seconds / own
            else:
                speed += t.node[node].flops
        if carried >= t.micro_batches:
            return most * (1 + 1e-9)
        less = speed * seconds / (t.passes * (t.micro_batches - carried))
        if less >= most:
            return most * (1 + 1e-9)
        most = less


@compiled()
def _fill_usually(t: Tables, sketch: Sketch, stages: int) -> bool:
    """Gives each stage as many layers as its ``work``, ``gradients`` and its members' memories allow. True when all layers have
    a stage.

    Only correct if all nodes keep what they need as Keeping() says: then the smallest memory of a stage decides. The function
    passes no arrays on, so Numba compiles it into its callers, which makes these twice as fast.
    """
    layers, end = len(t.layer) - 1, 0
    sketch.stage[0].cut = 0
    for stage in range(stages):
        begin, last = end, layers - (stages - 1 - stage)
        held = min(t.least_held[stages, stage], t.micro_batches)
        flops = t.layer[begin].flops_before + sketch.stage[stage].work
        most = t.layer[begin].gradients_before + sketch.stage[stage].gradients
        room = sketch.stage[stage].memory + t.layer[begin].state_before + held * t.layer[begin].kept_before
        working = 0.0
        while end < last and t.layer[end + 1].flops_before <= flops and t.layer[end + 1].gradients_before <= most:
            working = max(working, t.layer[end].working)
            if t.layer[end + 1].state_before + held * t.layer[end + 1].kept_before + working - room >= ENOUGH:
                break
            end += 1
        if end == begin:
            return False
        sketch.stage[stage + 1].cut = end
    return end == layers


@compiled()
def _fill_in_any_way(t: Tables, sketch: Sketch, stages: int) -> bool:
    """Like `_fill_usually`, where nodes may differ in how they keep what they need. If some member of a stage computes layers
    again, the stage counts as if all its members did."""
    layers, end = len(t.layer) - 1, 0
    sketch.stage[0].cut = 0
    for stage in range(stages):
        begin, last = end, layers - (stages - 1 - stage)
        held = float(min(t.least_held[stages, stage], t.micro_batches))
        flops = t.layer[begin].flops_before + sketch.stage[stage].work
        most = t.layer[begin].gradients_before + sketch.stage[stage].gradients
        while end < last and t.layer[end + 1].flops_before <= flops and t.layer[end + 1].gradients_before <= most:
            passes = _most_passes(t, sketch, stage, begin, end + 1, held, 0.0)
            work = t.layer[end + 1].flops_before - t.layer[begin].flops_before
            if (
                passes < 0 or work * (passes / t.passes) > sketch.stage[stage].work
            ):  # reckoned without computing layers again
                break
            end += 1
        if end == begin:
            return False
        sketch.stage[stage + 1].cut = end
    return end == layers


@compiled()
def _most_passes(t: Tables, sketch: Sketch, stage: int, first: int, past_last: int, held: float, extra: float) -> float:
    """The most forward passes that layers [first, past_last) cost a member of the stage per micro-batch; -1 where some member has
    no room for them with ``extra`` bytes more."""
    cheapest = first_need(t, first, past_last)
    passes = cheapest.passes
    if cheapest.host == 0.0 and lacking(cheapest, held, sketch.stage[stage].memory, np.inf) < ENOUGH:
        return passes
    ways = every_need(t, first, past_last)
    for node in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
        memory, host_memory, least, own = t.node[node].memory, t.node[node].host_memory, np.inf, 0.0
        for way in ways:
            if least >= ENOUGH:
                least, own = min(least, lacking(way, held, memory, host_memory)), way.passes
        if least >= ENOUGH + extra:
            return -1.0
        passes = max(passes, own)
    return passes


@entry()
def nearly_fitting_cuts(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Sets the cuts that fit the sketch's members with the least memory added to every device, and to its host. There are at
    least as many layers as stages.

    A bisection. Each of its tests is exact.
    """
    assert stages < len(t.layer)
    _survey(t, sketch, stages)
    low, high = 0.0, 1.0
    while not _fit(t, sketch, stages, high, cuts):
        low, high = high, 2 * high
    while high - low > 1.0 + 1e-6 * low:
        middle = (low + high) / 2
        if _fit(t, sketch, stages, middle, cuts):
            high = middle
        else:
            low = middle


@compiled(makes_arrays=True)
def _fit(t: Tables, sketch: Sketch, stages: int, extra: float, cuts: Ints) -> bool:
    """Sets cuts that all members have room for if each gets ``extra`` more bytes. Returns False, and leaves ``cuts`` unchanged,
    if no cuts fit.

    Taking as many layers as fit from the front is not enough: the next stage must have room for one.
    """
    layers = len(t.layer) - 1
    # By number of stages and the end of the last stage: where the last stage may begin.
    begins = np.full((stages + 1, layers + 1), -1)
    begins[0, 0] = 0
    for stage in range(stages):
        held, end = float(min(t.least_held[stages, stage], t.micro_batches)), 0
        last = layers - (stages - 1 - stage)
        for begin in range(stage, last):
            if begins[stage, begin] < 0:
                continue
            end = max(end, begin)  # up to there layers fit from further ahead, and so from here
            while end < last and _most_passes(t, sketch, stage, begin, end + 1, held, extra) >= 0:
                end += 1
            begins[stage + 1, begin + 1 : end + 1] = begin
    if begins[stages, layers] < 0:
        return False
    cuts[stages] = layers
    for stage in range(stages, 0, -1):
        cuts[stage - 1] = begins[stage, cuts[stage]]
    return True
