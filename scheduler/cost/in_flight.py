"""How many micro-batches a node holds in flight: enough to stay busy for a round trip."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.keeping import as_kept, first_need, room, update_seconds
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Draft, Floats, Ints, Problem
from dtfm.scheduler.model.tables import Tables, tables

SLACK = 2.0
"""Factor on the time that a micro-batch spends on links, to allow for queueing and late hosts. On emulated worldwide links
that are about as busy as the devices, it reduced the busiest node's waiting from a quarter of a step to a tenth."""

_least_in_flight = compiled()(in_flight)


def depths(problem: Problem, draft: Draft) -> tuple[tuple[int, ...], ...]:
    """The largest number of micro-batches in flight on each node: by stage, by replica.

    A micro-batch travels from a node to the last stage and back over the longest way that flows allow (time on links multiplied
    by SLACK). In this time the node starts others. Their number assumes that the node spreads its micro-batches evenly over the
    busiest device's computing time. Each following stage adds one, because devices are not perfectly even. The node's memory
    limits the number. It is at least memory.in_flight: every valid plan has room for that.
    """
    t = tables(problem)
    passes, possible, _ = needs_of_seats(t, draft)
    numbers = depths_of_seats(t, draft, passes, possible).tolist()
    return tuple(tuple(numbers[begin:end]) for begin, end in pairwise(draft.first.tolist()))


@compiled()
def exchange(t: Tables, a: int, b: int, size: float) -> float:
    """Seconds to send ``size`` bytes from node a to node b and the same number back; infinite without links."""
    slowness = t.link[a, b].slowness + t.link[b, a].slowness
    return np.inf if np.isinf(slowness) else t.link[a, b].latency + t.link[b, a].latency + size * slowness


@compiled()
def depth_of(stages: int, stage: int, started: float, possible: float, micro_batches: int) -> int:
    """The number of micro-batches in flight on a node of the stage.

    ``possible`` is the number that fits into its memory. ``started`` is the number that it starts while one travels to the last
    stage and back.
    """
    least = _least_in_flight(stage, stages)
    if stage == stages - 1:
        return least  # its backward pass follows directly
    useful = np.ceil(started - 1e-6) + (stages - stage)
    return max(least, int(min(useful, np.floor(possible), float(micro_batches))))


@entry(makes_arrays=True)
def needs_of_seats(t: Tables, s: Draft) -> tuple[Floats, Floats, float]:
    """By seat, then for all seats: what a micro-batch costs there, in forward passes, its backward pass included (float64
    [seats]); how many micro-batches in flight have room there (float64 [seats]); and the seconds that the slowest seat's bus is
    busy after gradients are reduced (keeping.update_seconds)."""
    passes, possible, slowest = np.empty(len(s.node)), np.empty(len(s.node)), 0.0
    stages = len(s.cut) - 1
    for stage in range(stages):
        first, past_last = s.cut[stage], s.cut[stage + 1]
        cheapest, fewest = first_need(t, first, past_last), float(min(t.least_held[stages, stage], t.micro_batches))
        for seat in range(s.first[stage], s.first[stage + 1]):
            wanted = as_kept(t, s.way[seat], cheapest, first, past_last, fewest, s.node[seat])
            node = t.node[s.node[seat]]
            passes[seat] = wanted.passes
            possible[seat] = room(wanted, node.memory, node.host_memory) / max(wanted.each, 1.0)
            slowest = max(slowest, update_seconds(t, wanted, node.host_memory))
    return passes, possible, slowest


@entry(makes_arrays=True)
def depths_of_seats(t: Tables, s: Draft, passes: Floats, possible: Floats) -> Ints:
    """The same as `depths`, by seat: int64 [seats]. ``passes`` and ``possible`` come from `needs_of_seats`."""
    ways, busiest = _ways(t, s, passes), 1e-12
    stages = len(s.cut) - 1
    for stage in range(stages):
        work = t.layer[s.cut[stage + 1]].flops_before - t.layer[s.cut[stage]].flops_before
        for seat in range(s.first[stage], s.first[stage + 1]):
            busiest = max(busiest, passes[seat] * work / t.node[s.node[seat]].flops * s.load[seat])
    result = np.empty(len(s.node), np.int64)
    for stage in range(stages):
        for seat in range(s.first[stage], s.first[stage + 1]):
            started = ways[seat] * s.load[seat] / busiest
            result[seat] = depth_of(stages, stage, started, possible[seat], t.micro_batches)
    return result


@compiled(makes_arrays=True)
def _ways(t: Tables, s: Draft, passes: Floats) -> Floats:
    """[seats]: seconds from the beginning of a micro-batch's forward pass to the end of its backward pass there, over the
    longest way to the last stage and back that flows allow."""
    ways = np.zeros(len(s.node))
    stages = len(s.cut) - 1
    for stage in range(stages - 1, -1, -1):
        begin, end = s.first[stage], s.first[stage + 1]
        work = t.layer[s.cut[stage + 1]].flops_before - t.layer[s.cut[stage]].flops_before
        size = t.layer[s.cut[stage + 1] - 1].activation
        flow = s.flow_at[stage]
        for a in range(begin, end):
            beyond = 0.0
            if stage < stages - 1:
                for b in range(end, s.first[stage + 2]):
                    if s.flow[flow]:
                        beyond = max(beyond, SLACK * exchange(t, s.node[a], s.node[b], size) + ways[b])
                    flow += 1
            ways[a] = passes[a] * work / t.node[s.node[a]].flops + beyond
    return ways
