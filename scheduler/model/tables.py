"""A problem's arrays in the form that compiled functions take.

They are few, and made of records, because Numba counts the references to every array that it passes on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dtfm.scheduler.model.memory import BUS_BYTES_PER_SECOND, LADDER, in_flight
from dtfm.scheduler.model.problem import Floats, Ints, Problem, Records
from dtfm.scheduler.model.request import MOST_STAGES
from dtfm.scheduler.model.workload import Workload

FASTEST = 1e13
"""The most bytes per second that a link counts with: sums with infinite ones could not be taken apart again."""
MISSING = 1e6
"""The most seconds of an exchange in the paper's cost model: those of a missing link, so that a plan without one costs less."""
REMEMBERED = 4
"""Number of problems whose tables are remembered."""


class Tables(NamedTuple):
    """A Problem by number of node and layer, in FLOP/s, bytes and seconds.

    ``node[i]`` has flops, memory, host_memory, proven (0 or 1), and per_up and per_down: the seconds per byte of its line.
    ``line`` is the row of that line: i, or one behind the nodes, where Cluster.lines come, of which only these seconds count.
    ``sibling`` is the next of those that share the line, in a ring: i itself if it has one of its own. With ``mixed``, each stage
    needs a proven node; with ``tied``, each node of the first one a link with each of the last.
    ``link[i, j]`` has latency, slowness and via: the row of its relay's line, or -1 where no other line than those of i and j is
    passed. ``relayed`` is the number of links with one. ``toward[j, kind, i]`` has, of the link from i to j and back, what
    sums.Sums sums up over j; all are 0 from a node to itself. ``slower[i, j]`` is the slowness of the slower of the two links. In
    both, a relayed link has at most an even share of its relay's line, as if all whom that serves used it at once.
    ``layer[k]`` has the sums over layers [0, k) of flops, gradients, kept and input bytes per micro-batch in flight, and of what
    state needs: all of it on the device but what exchanges need (outer), or beside the host and in the host's memory; and the
    activation and working bytes of layer k. There is a row more than layers.
    ``working[level, k, checkpointed]`` is the most working bytes among layers [k, k + 2 ** level): keeping.need.
    ``ways`` are those that the workload allows, a bit for each of memory.LADDER, and ``first_way`` is the first of them.
    ``least_held[s, k]`` is the least number of micro-batches in flight at stage k of s. ``update_seconds_per_byte`` are those of
    keeping.update_seconds per byte that is kept in the host's memory. ``paper``, float64 [2, nodes, nodes], are the seconds of
    the paper's cost model for gradients and activations: Problem.paper_exchanges, at most MISSING; [2, 0, 0] without costs.
    """

    node: Records
    link: Records
    toward: Floats
    slower: Floats
    layer: Records
    least_held: Ints
    working: Floats
    ways: int
    first_way: int
    micro_batches: int
    relayed: int
    mixed: bool
    tied: bool
    update_seconds_per_byte: float
    paper: Floats


@lru_cache(REMEMBERED)
def tables(problem: Problem) -> Tables:
    """The problem's tables."""
    workload = problem.workload
    ways = [LADDER.index(way) for way in workload.ways]
    held = np.zeros((MOST_STAGES + 1, MOST_STAGES), dtype=np.int64)
    for stages in range(1, MOST_STAGES + 1):
        held[stages, :stages] = [in_flight(stage, stages) for stage in range(stages)]
    with np.errstate(divide="ignore"):
        per_up, per_down, speed = 1.0 / problem.up, 1.0 / problem.down, 1.0 / problem.slowness
    lines = problem.cluster.lines
    rows = np.append(problem.line, len(problem.line) + np.arange(len(lines)))
    per_up = np.append(per_up, [1 / each.up for each in lines])
    per_down = np.append(per_down, [1 / each.down for each in lines])
    shared = _shared(problem, np.maximum(per_up, per_down))
    with np.errstate(divide="ignore"):
        speed = np.minimum(np.minimum(speed, 1.0 / shared), FASTEST)
    slower, faster = np.minimum(speed, speed.T), np.maximum(speed, speed.T)
    exchange = np.where(slower > 0, 1 + slower / np.maximum(faster, 1e-300), 0.0)
    toward = np.stack([slower, exchange, problem.latency + problem.latency.T], axis=1)
    toward[np.arange(len(speed)), :, np.arange(len(speed))] = 0.0
    return Tables(
        node=_records(
            flops=np.pad(problem.flops, (0, len(lines))),
            memory=np.pad(problem.memory, (0, len(lines))),
            host_memory=np.pad(problem.host_memory, (0, len(lines))),
            per_up=per_up,
            per_down=per_down,
            line=rows,
            sibling=_siblings(rows),
            proven=np.pad(problem.proven.astype(np.int64), (0, len(lines))),
        ),
        link=_records(latency=problem.latency, slowness=problem.slowness, via=problem.via),
        toward=np.ascontiguousarray(toward),
        slower=np.maximum(np.maximum(problem.slowness, problem.slowness.T), np.maximum(shared, shared.T)),
        layer=_records(
            flops_before=problem.flops_before,
            state_before=problem.parameters_before * workload.bytes_kept_per_parameter_byte,
            outer_before=problem.parameters_before * workload.for_exchanges_per_parameter_byte,
            beside_host_before=problem.parameters_before * workload.bytes_beside_host_per_parameter_byte,
            host_before=problem.parameters_before * workload.host_bytes_per_parameter_byte,
            kept_before=problem.kept_before,
            inputs_before=problem.inputs_before,
            working=np.array([*(layer.working_bytes for layer in workload.layers), 0.0]),
            gradients_before=problem.reduced_before,
            activation=np.append(problem.activation, 0.0),
        ),
        least_held=held,
        working=_working(workload),
        ways=sum(1 << way for way in ways),
        first_way=ways[0],
        micro_batches=int(workload.micro_batches),
        relayed=int((problem.via >= 0).sum()),
        mixed=problem.is_mixed,
        tied=workload.tied,
        update_seconds_per_byte=float(
            workload.bytes_over_bus_per_parameter_byte / workload.host_bytes_per_parameter_byte / BUS_BYTES_PER_SECOND
        ),
        paper=np.zeros((2, 0, 0)) if workload.paper is None else np.minimum(problem.paper_exchanges(), MISSING),
    )


def _siblings(rows: Ints) -> Ints:
    """See Tables: of each row the next one on the same line."""
    siblings = np.arange(len(rows))
    for line in np.flatnonzero(np.bincount(rows) > 2):  # itself, and several nodes
        nodes = np.flatnonzero(rows == line)[:-1]
        siblings[nodes] = np.roll(nodes, -1)
    return siblings


def _shared(problem: Problem, per_byte: Floats) -> Floats:
    """Seconds per byte of a tensor on each link when its relay serves all whom it may serve at once; 0 where it is direct.

    ``per_byte`` is by row of Tables.node.
    """
    slowness = np.zeros_like(problem.slowness)
    for relay in np.unique(problem.via[problem.via >= 0]):
        served = problem.via == relay
        slowness[served] = per_byte[relay] * np.count_nonzero(served.any(axis=1))
    return slowness


def _working(workload: Workload) -> Floats:
    """See Tables.working."""
    layers = workload.layers
    most = [(layer.working_bytes, layer.kept + layer.working_bytes) for layer in layers]
    working = [np.array(most, dtype=np.float64)]
    while 2 ** len(working) <= len(layers):
        last, reach = working[-1], 2 ** (len(working) - 1)
        longer = last.copy()
        longer[:-reach] = np.maximum(last[:-reach], last[reach:])
        working.append(longer)
    return np.stack(working)


def _records(**fields: Floats | Ints) -> Records:
    """The arrays, all of one shape, as one array of records."""
    shape = next(iter(fields.values())).shape
    made = np.zeros(shape, dtype=[(name, values.dtype) for name, values in fields.items()])
    for name, values in fields.items():
        made[name] = values
    return made
