"""Where the model is cut into stages, given the group of nodes that holds each."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.cost.pace import FREE
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.keeping import ENOUGH, chosen, first_need, least_lacking
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.sums import BYTES_BACK, BYTES_THERE, SLOWEST_LINK, SPEED
from dtfm.scheduler.model.tables import Tables

FASTER = 1.6
"""Factor between the first times that are tried for the pipeline; 1.05 where these come near."""
PIPELINES = 6
"""Number of times for the pipeline that are tried, 1.07 apart, once one is found in which all layers fit."""
HALVINGS = 10
"""Number of halvings of the time for the reductions."""


@compiled
def cut_model(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> bool:
    """Sets good cuts for the sketch's members and sums, within every node's memory.

    False, with ``cuts`` as they were, where none fit.

    A step is estimated as the seconds that the busiest stage needs for all micro-batches, plus the seconds of the slowest
    reduction. When both are given, taking as many layers as possible for each stage from the front leaves the fewest to the
    rest, so that a pass over the layers tells whether all fit. For some times of the pipeline, a bisection finds the least time
    of the reductions; the best sum wins. Links count only as what they let a node compute.
    """
    layers = len(t.layer) - 1
    if stages > layers:
        return False
    speed = _survey(t, sketch, stages)
    seconds = 3 * t.layer[layers].flops_before * t.micro_batches / speed
    most, step, best, fitting = 1e6 * seconds, FASTER, np.inf, 0
    while fitting < PIPELINES and seconds < min(most, best):
        for stage in range(stages):
            sketch.stage[stage].work = _most_work(t, sketch, stage, seconds)
            sketch.stage[stage].gradients = np.inf
        if not _fill(t, sketch, stages, 0.0):
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
            if _fill(t, sketch, stages, 0.0):
                high = middle
                if seconds + high < best:
                    best = seconds + high
                    _take(sketch, stages, cuts)
            else:
                low = middle
        fitting += 1
        seconds *= 1.07
    return best < np.inf


@compiled
def _take(sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Copies the cuts that were tried."""
    for stage in range(stages + 1):
        cuts[stage] = sketch.stage[stage].cut


@compiled
def _survey(t: Tables, sketch: Sketch, stages: int) -> float:
    """Fills in the least memory of each stage, the seconds that it takes to reduce a byte, and what each member's links and
    connection need per micro-batch (as ``own``). Returns the FLOP/s of all members."""
    speed, size, sums = 0.0, t.layer[len(t.layer) // 2].activation, sketch.sums
    for stage in range(stages):
        sketch.stage[stage].memory = np.inf
        slowness, own = sums.slowest[sums.row[stage]].slowness, sums.toward[sums.row[stage]]
        members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
        for node in members:
            speed += t.node[node].flops
            sketch.stage[stage].memory = min(sketch.stage[stage].memory, t.node[node].memory)
            connection = max(t.node[node].per_up, t.node[node].per_down)
            sketch.node[node].own = 0.0
            sides = 0
            for beside in (stage - 1, stage + 1):
                if 0 <= beside < stages:
                    sides += 1
                    toward = sums.toward[sums.row[beside]]
                    if toward[SPEED, node] >= SLOWEST_LINK:
                        sketch.node[node].own = max(sketch.node[node].own, FREE * size / toward[SPEED, node])
            sketch.node[node].own = max(sketch.node[node].own, sides * size * connection)
            bytes_per_byte = max(own[BYTES_THERE, node], own[BYTES_BACK, node])
            slowness = max(slowness, t.copies * bytes_per_byte * connection, t.node[node].own_slowness)
        sketch.stage[stage].slowness = 2 * slowness / (len(members) * t.copies)
    return speed


@compiled
def _most_work(t: Tables, sketch: Sketch, stage: int, seconds: float) -> float:
    """The most FLOPs of a stage's forward pass with which its members compute all micro-batches in ``seconds``.

    A member whose links take longer than its device does what its links carry; the others share the rest by speed.
    """
    members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
    most = np.inf
    while True:
        speed, carried = 0.0, 0.0
        for node in members:
            own = sketch.node[node].own
            if 3 * most <= own * t.node[node].flops and own > 0:
                carried += seconds / own
            else:
                speed += t.node[node].flops
        if carried >= t.micro_batches:
            return most * (1 + 1e-9)
        less = speed * seconds / (3 * (t.micro_batches - carried))
        if less >= most:
            return most * (1 + 1e-9)
        most = less


@compiled
def _fill(t: Tables, sketch: Sketch, stages: int, extra: float) -> bool:
    """Gives each stage as many layers as its ``work``, ``gradients`` and its members' memories allow, when each of these has
    ``extra`` bytes more. True when all layers have a stage."""
    layers, end = len(t.layer) - 1, 0
    sketch.stage[0].cut = 0
    for stage in range(stages):
        begin, last = end, layers - (stages - 1 - stage)
        most = t.layer[begin].gradients_before + sketch.stage[stage].gradients
        while (
            end < last
            and t.layer[end + 1].gradients_before <= most
            and _able(t, sketch, stages, stage, begin, end + 1, extra)
        ):
            end += 1
        if end == begin:
            return False
        sketch.stage[stage + 1].cut = end
    return end == layers


@compiled
def _able(t: Tables, sketch: Sketch, stages: int, stage: int, first: int, past_last: int, extra: float) -> bool:
    """Whether the stage may have layers [first, past_last), as far as its ``work`` and its members' memories go.

    A stage in which some member computes layers again counts as if all did.
    """
    work = t.layer[past_last].flops_before - t.layer[first].flops_before
    if work > sketch.stage[stage].work:
        return False
    held = float(min(t.least_held[stages, stage], t.micro_batches))
    cheapest = first_need(t, first, past_last)
    passes = cheapest.passes
    if cheapest.host > 0 or cheapest.fixed + held * cheapest.each - sketch.stage[stage].memory >= ENOUGH + extra:
        if t.ways == 1 << cheapest.way and cheapest.host == 0:
            return False
        for node in sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]:
            if least_lacking(t, cheapest, first, past_last, held, node) >= ENOUGH + extra:
                return False
            passes = max(passes, chosen(t, cheapest, first, past_last, held, node).passes)
    return bool(work * (passes / 3) <= sketch.stage[stage].work)  # which was reckoned with 3 passes


@compiled
def nearly_fitting_cuts(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> None:
    """Sets the cuts that fit the sketch's members with the least memory added to every device, and to its host.

    A bisection. Each of its tests is exact: taking as many layers as fit from the front leaves the fewest to the rest.
    """
    _survey(t, sketch, stages)
    for stage in range(stages):
        sketch.stage[stage].work = sketch.stage[stage].gradients = np.inf
    low, high = 0.0, 1.0
    while not _fill(t, sketch, stages, high):
        low, high = high, 2 * high
    _take(sketch, stages, cuts)
    while high - low > 1.0 + 1e-6 * low:
        middle = (low + high) / 2
        if _fill(t, sketch, stages, middle):
            high = middle
            _take(sketch, stages, cuts)
        else:
            low = middle
