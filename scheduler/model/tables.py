"""A problem's arrays in the form that compiled functions take.

They are few, and made of records, because Numba counts the references to every array that it passes on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dtfm.scheduler.model.memory import BUS_BYTES_PER_SECOND, LADDER, in_flight
from dtfm.scheduler.model.problem import Floats, Ints, Problem, Records
from dtfm.scheduler.model.relayed_links import shared_slowness
from dtfm.scheduler.model.request import MOST_STAGES
from dtfm.scheduler.model.workload import Workload

FASTEST = 1e13
"""The most bytes per second that a link counts with: infinite speeds could not be taken out of a sum again."""
MISSING = 1e6
"""The most seconds of an exchange in the paper's cost model. A missing link counts as many, so that a plan without one costs
less."""
REMEMBERED = 4
"""Number of problems whose tables are remembered."""


class Tables(NamedTuple):
    """A Problem by number of node and layer, in FLOP/s, bytes and seconds."""

    node: Records
    """[nodes + lines]: flops, memory, host_memory, proven (0 or 1), per_up and per_down (the seconds per byte of the node's
    line), line, sibling. ``line`` is the row of that line: the node's own row, or a row behind the nodes for each of
    Cluster.lines. Only per_up and per_down count in these rows. ``sibling`` is the next node on the same line, in a ring: the
    node itself if it has a line of its own."""
    link: Records
    """[nodes, nodes]: latency, slowness and via. ``via`` is the row of the relay's line, or -1 if the link passes no line
    except those at its ends."""
    toward: Floats
    """[nodes, 3, nodes]: ``toward[j, kind, i]`` is about the link from i to j and back, summed up by sums.Sums over j; 0 from a
    node to itself. A relayed link has at most an even share of its relay's line, as if all nodes that the relay serves used it
    at the same time."""
    slower: Floats
    """[nodes, nodes]: the slowness of the slower of the links from i to j and back. Relayed links count as in ``toward``."""
    layer: Records
    """[layers + 1]: the ``*_before`` fields are sums over layers [0, k). They sum flops, gradients, and kept and input bytes
    per micro-batch in flight. They also sum the bytes of state: all of it on the device (state) except what exchanges need
    (outer), or the part beside the host's (beside_host) and the part in the host's memory (host). The bytes on the device
    include frozen weights. ``activation`` and ``working`` are the bytes of layer k itself."""
    least_held: Ints
    """[s, k]: the least number of micro-batches in flight at stage k of s."""
    working: Floats
    """[level, k, checkpointed]: the most working bytes among layers [k, k + 2 ** level). See keeping.need."""
    ways: int
    """The ways that the workload allows: a bit for each of memory.LADDER."""
    first_way: int
    """The first of these ways, by its place in memory.LADDER."""
    micro_batches: int
    passes: float
    """Workload.passes."""
    relayed: int
    """The number of links with a relay's line."""
    mixed: bool
    """Each stage needs a proven node."""
    tied: bool
    """Each node of the first stage needs a link with each of the last."""
    update_seconds_per_byte: float
    """keeping.update_seconds per byte that is kept in the host's memory."""
    paper: Floats
    """float64 [2, nodes, nodes]: the paper's seconds for gradients and activations (Problem.paper_exchanges), at most MISSING.
    [2, 0, 0] without costs."""


@lru_cache(REMEMBERED)
def tables(problem: Problem) -> Tables:
    """The problem's tables."""
    workload, sizes = problem.workload, (problem.parameters_before, problem.orthogonal_before)
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
    shared = shared_slowness(problem, np.maximum(per_up, per_down))
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
            state_before=workload.kept_on_device(*sizes) + problem.frozen_before,
            outer_before=problem.parameters_before * workload.for_exchanges_per_parameter_byte,
            beside_host_before=workload.kept_beside_host(*sizes) + problem.frozen_before,
            host_before=workload.kept_on_host(*sizes),
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
        passes=workload.passes,
        relayed=int((problem.via >= 0).sum()),
        mixed=problem.is_mixed,
        tied=workload.tied,
        update_seconds_per_byte=float(
            workload.bytes_over_bus_per_parameter_byte / workload.host_bytes_per_parameter_byte / BUS_BYTES_PER_SECOND
        ),
        paper=np.zeros((2, 0, 0)) if workload.paper is None else np.minimum(problem.paper_exchanges(), MISSING),
    )


def _siblings(rows: Ints) -> Ints:
    """By row, the next row on the same line: see Tables.node."""
    siblings = np.arange(len(rows))
    for line in np.flatnonzero(np.bincount(rows) > 2):  # itself, and several nodes
        nodes = np.flatnonzero(rows == line)[:-1]
        siblings[nodes] = np.roll(nodes, -1)
    return siblings


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
