"""Where the model is cut into stages, given the group of nodes that holds each."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Groups, Ints, Problem
from dtfm.scheduler.model.sketch import Sketch
from dtfm.scheduler.model.tables import Tables

FASTER = 1.6
"""Factor between the first times that are tried for the pipeline; 1.05 where these come near."""
PIPELINES = 6
"""Number of times for the pipeline that are tried, 1.07 apart, once one is found in which all layers fit."""
HALVINGS = 10
"""Number of halvings of the time for the reductions."""


@compiled
def cut_model(t: Tables, sketch: Sketch, stages: int, cuts: Ints) -> bool:
    """Sets good cuts for the sketch's members, within every node's memory. False, with ``cuts`` as they were, where none fit.

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
        if not _fill(t, sketch, stages):
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
            if _fill(t, sketch, stages):
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
    """Fills in the least memory of each stage, the seconds that it takes to reduce a byte, and what each member's connection
    needs per micro-batch (as ``own``). Returns the FLOP/s of all members."""
    speed, size = 0.0, t.layer[len(t.layer) // 2].activation
    for stage in range(stages):
        sketch.stage[stage].memory, sketch.stage[stage].slowness = np.inf, 0.0
        members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
        sides = (1 if stage > 0 else 0) + (1 if stage < stages - 1 else 0)
        for node in members:
            speed += t.node[node].flops
            sketch.stage[stage].memory = min(sketch.stage[stage].memory, t.node[node].memory)
            connection = max(t.node[node].per_up, t.node[node].per_down)
            sketch.node[node].own = sides * size * connection
            sketch.stage[stage].slowness = max(sketch.stage[stage].slowness, (len(members) - 1) * connection)
            for peer in members:
                if peer != node:
                    sketch.stage[stage].slowness = max(sketch.stage[stage].slowness, t.link[node, peer].slowness)
        sketch.stage[stage].slowness = (
            0.0 if len(members) * t.copies == 1 else 2 * sketch.stage[stage].slowness / len(members)
        )
    return speed


@compiled
def _most_work(t: Tables, sketch: Sketch, stage: int, seconds: float) -> float:
    """The most FLOPs of a stage's forward pass with which its members compute all micro-batches in ``seconds``."""
    members = sketch.members[sketch.stage[stage].first : sketch.stage[stage + 1].first]
    speed = 0.0
    for node in members:
        speed += t.node[node].flops
    low, high = 0.0, seconds * speed / (3 * t.micro_batches)
    middle = high
    for _ in range(14):
        computed = 0.0
        for node in members:
            pace = max(3 * middle / t.node[node].flops, sketch.node[node].own)
            computed += seconds / max(pace, 1e-300)
        if computed >= t.micro_batches * (1 - 1e-9):
            low = middle
        else:
            high = middle
        if low == high:
            break
        middle = (low + high) / 2
    return low * (1 + 1e-9)


@compiled
def _fill(t: Tables, sketch: Sketch, stages: int) -> bool:
    """Gives each stage as many layers as its ``work``, ``gradients`` and ``memory`` allow. True when all layers have a stage."""
    layers, end = len(t.layer) - 1, 0
    sketch.stage[0].cut = 0
    for stage in range(stages):
        begin, last = end, layers - (stages - 1 - stage)
        held = min(t.least_held[stages, stage], t.micro_batches)
        flops = t.layer[begin].flops_before + sketch.stage[stage].work
        most = t.layer[begin].gradients_before + sketch.stage[stage].gradients
        room = sketch.stage[stage].memory + t.layer[begin].state_before + held * t.layer[begin].kept_before
        while (
            end < last
            and t.layer[end + 1].flops_before <= flops
            and t.layer[end + 1].gradients_before <= most
            and t.layer[end + 1].state_before + held * t.layer[end + 1].kept_before <= room
        ):
            end += 1
        if end == begin:
            return False
        sketch.stage[stage + 1].cut = end
    return end == layers


def nearly_fitting_cuts(problem: Problem, groups: Groups) -> tuple[int, ...]:
    """The cuts that fit with the least memory added to every device.

    A bisection. Each of its tests is exact: taking as many layers as fit from the front leaves the fewest to the rest.
    """
    layers = len(problem.activation)
    rooms = [float(problem.memory[list(group)].min()) for group in groups]
    most = problem.workload.micro_batches
    held = [min(in_flight(stage, len(groups)), most) for stage in range(len(groups))]
    needs = [
        (problem.parameters_before * problem.state_factor + count * problem.kept_before).tolist() for count in held
    ]

    def fill(extra: float) -> tuple[int, ...] | None:
        cuts = [0]
        for stage, (room, need) in enumerate(zip(rooms, needs, strict=True)):
            end = first = cuts[-1]
            last = layers - (len(groups) - 1 - stage)
            while end < last and need[end + 1] <= need[first] + room + extra:
                end += 1
            if end == first:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == layers else None

    low, high = 0.0, max(need[-1] for need in needs)
    best = fill(high)
    assert best is not None
    while high - low > 1.0 + 1e-6 * low:
        middle = (low + high) / 2
        cuts = fill(middle)
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return best
