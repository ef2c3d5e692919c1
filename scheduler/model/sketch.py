"""A plan that is being tried, in arrays that are filled again and again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Draft, Floats, Groups, Ints, Records
from dtfm.scheduler.model.request import MOST_STAGES
from dtfm.scheduler.model.sums import Sums, empty_sums, leave
from dtfm.scheduler.model.tables import Tables

NO_LINK = 1e12
"""Price of a plan that lacks links. Added to it: the number of links that its replica groups lack, or 1 when micro-batches have
no way through. Plans that work cost less than this."""
NOT_PROVEN = 1e13
"""Price of a plan with stages that have no proven node, plus the number of such stages."""
NO_ROOM = 1e15
"""Price of a plan that lacks memory, plus the bytes that the worst node lacks."""


class Position(NamedTuple):
    """Which node is in which stage, and where the model is cut. A search decides nothing else."""

    place: Ints
    """int64 [nodes]: the stage of each node, -1 for idle."""
    cuts: Ints
    """int64 [MOST_STAGES + 2]: stage s has layers [cuts[s], cuts[s + 1])."""
    stages: Ints
    """int64 [1]: the number of stages."""


class Sketch(NamedTuple):
    """What follows from a position, step by step."""

    members: Ints
    """int64: ``members[stage[s].first : stage[s + 1].first]`` are the members of stage s, ascending."""
    node: Records
    """Records NODE, with the rows of Tables.node."""
    stage: Records
    """Records STAGE."""
    edge: Records
    """Records EDGE: ``edge[e]``, with e in [stage[s].begin, stage[s + 1].begin), are the flows of the boundary after stage s."""
    sums: Sums
    """Over the members."""
    each: Floats
    """float64 [pairs]: the seconds that a link needs for a micro-batch. The pairs of the boundary after stage s begin at
    stage[s].pairs."""
    taken: Ints
    """int64 [pairs]: the micro-batches that a link carries."""
    shards: Floats
    """float64 [4, nodes]: working space of a reduction."""
    decides: Ints
    """int64 [6]: who decides how long a step takes; -1 stands for nobody. The first three are of the pipeline: the slowest
    node, its neighbour if their link decides, and its stage. The other three are of the reduction that ends last: two nodes
    whose link decides, and their stage."""
    levels: Floats
    """float64 [2], means over stages: when the slowest node of a stage could be done, and how long the stage then reduces."""
    known: Records
    """Records PAPER [2, nodes]: what the paper's cost model says of the last two positions that it priced, by node (``place``)
    and by stage. [2, 0] if the workload has no costs for it."""


NODE = np.dtype(
    [
        ("load", np.int64),  # micro-batches per step
        ("left", np.int64),  # micro-batches without a link yet
        ("alone", np.float64),  # seconds per micro-batch of device, connection or round trips, whichever is slowest
        ("pace", np.float64),  # the same, or of its links if they are slower: all to and from a stage counted together
        ("forward", np.float64),  # seconds of one forward pass
        ("passes", np.float64),  # what a micro-batch costs there, in forward passes, its backward pass included
        ("arrival", np.float64),  # seconds until the first micro-batch arrives
        ("homeward", np.float64),  # seconds of a micro-batch's way from here back to the first stage
        ("trip", np.float64),  # seconds of a micro-batch's way to the last stage and back, computing included
        ("longest_trip", np.float64),  # the same over the slowest links, with in_flight.SLACK
        ("own", np.float64),  # when the node, or its slowest link, would be done if nobody else were late
        ("end", np.float64),  # when its last backward pass ends
        ("sent", np.float64),  # bytes of activations and their gradients per step on this line
        ("received", np.float64),
        ("shards", np.float64),  # bytes of gradients, as many each way, when replicas send each other their shards once
    ]
)
STAGE = np.dtype(
    [
        ("first", np.int64),  # its first member
        ("begin", np.int64),  # the first flow after it
        ("pairs", np.int64),  # the first pair of a member and one of the next stage
        ("cut", np.int64),  # its first layer in the cuts that are tried
        ("memory", np.float64),  # bytes of the smallest member
        ("slowness", np.float64),  # seconds to reduce a byte of gradients
        ("work", np.float64),  # the most FLOPs that it may have
        ("gradients", np.float64),  # the most bytes of gradients that it may have
    ]
)
EDGE = np.dtype([("sender", np.int64), ("receiver", np.int64), ("count", np.int64)])
PAPER = np.dtype(
    [
        ("place", np.int64),  # the node's stage, -1: idle, -2: nothing is known yet
        ("group", np.float64),  # seconds of the stage's slowest member
        ("slowest", np.int64),  # this member
        ("boundary", np.float64),  # seconds of the slowest pair between the stage and the next one
        ("sender", np.int64),  # this pair
        ("receiver", np.int64),
        ("mean", np.float64),  # mean seconds of all pairs, in the matching with the least mean
    ]
)


def empty_position(nodes: int) -> Position:
    """A position with every node idle and no stage."""
    return Position(
        np.full(nodes, -1, dtype=np.int64), np.zeros(MOST_STAGES + 2, dtype=np.int64), np.zeros(1, np.int64)
    )


def position_of(groups: Groups, cuts: tuple[int, ...], nodes: int) -> Position:
    """The position with these groups and cuts."""
    position = empty_position(nodes)
    for stage, group in enumerate(groups):
        position.place[list(group)] = stage
    position.cuts[: len(cuts)] = cuts
    position.stages[0] = len(groups)
    return position


def groups_of(position: Position) -> Groups:
    """The nodes of each stage, in ascending order."""
    return tuple(tuple(np.flatnonzero(position.place == stage).tolist()) for stage in range(int(position.stages[0])))


def cuts_of(position: Position) -> tuple[int, ...]:
    return tuple(position.cuts[: int(position.stages[0]) + 1].tolist())


def empty_sketch(t: Tables) -> Sketch:
    """Arrays for plans of these tables."""
    nodes, rows = len(t.link), len(t.node)
    pairs = nodes * nodes // 4 + nodes  # between neighbouring stages there are at most a quarter of all pairs
    return Sketch(
        members=np.zeros(nodes, np.int64),
        node=np.zeros(rows, NODE),
        stage=np.zeros(MOST_STAGES + 2, STAGE),
        edge=np.zeros(pairs, EDGE),
        sums=empty_sums(nodes),
        each=np.zeros(pairs),
        taken=np.zeros(pairs, np.int64),
        shards=np.zeros((4, nodes)),
        decides=np.zeros(6, np.int64),
        levels=np.zeros(2),
        known=_nothing_known(t.paper.shape[1]),
    )


def _nothing_known(nodes: int) -> Records:
    known = np.zeros((2, nodes), PAPER)
    known["place"] = -2
    return known


@entry(makes_arrays=True)
def copy(source: Position, target: Position) -> None:
    """Makes ``target`` equal to ``source``."""
    target.place[:] = source.place
    target.cuts[:] = source.cuts
    target.stages[0] = source.stages[0]


@entry()
def gather_members(position: Position, sketch: Sketch) -> bool:
    """Fills in the members of each stage. False when a stage has none."""
    place, stages, stage = position.place, position.stages[0], sketch.stage
    for s in range(stages + 1):
        stage[s].first = 0
    for node in range(len(place)):
        if place[node] >= 0:
            stage[place[node] + 1].first += 1
    for s in range(stages):
        if stage[s + 1].first == 0:
            return False
        stage[s + 1].first += stage[s].first
    for node in range(len(place)):
        s = place[node]
        if s >= 0:
            sketch.members[stage[s].first] = node
            stage[s].first += 1
    for s in range(stages, 0, -1):
        stage[s].first = stage[s - 1].first
    stage[0].first = 0
    return True


@entry()
def not_proven(t: Tables, sketch: Sketch, stages: int) -> int:
    """The number of stages without a proven node, where each needs one."""
    count = 0
    for stage in range(stages if t.mixed else 0):
        proven = 0
        for at in range(sketch.stage[stage].first, sketch.stage[stage + 1].first):
            proven += t.node[sketch.members[at]].proven
        if proven == 0:
            count += 1
    return count


@compiled()
def _witness(t: Tables, sketch: Sketch, begin: int, end: int) -> int:
    """Of the members [begin, end) of a stage, a proven node to keep though it has no micro-batches, because no proven member
    has any. -1 if there is none."""
    stays = -1
    for at in range(begin, end):
        node = sketch.members[at]
        if t.node[node].proven:
            if sketch.node[node].load > 0:
                return -1
            if stays < 0:
                stays = node
    return stays


@entry()
def drop_idle(t: Tables, sketch: Sketch, stages: int) -> bool:
    """Takes the nodes without micro-batches out of their stages and of the sums, except one proven node that a stage needs.
    Returns whether there was any."""
    kept, before = 0, int(sketch.stage[stages].first)
    for stage in range(stages):
        begin = sketch.stage[stage].first
        stays = _witness(t, sketch, begin, sketch.stage[stage + 1].first) if t.mixed else -1
        sketch.stage[stage].first = kept
        for at in range(begin, sketch.stage[stage + 1].first):
            node = sketch.members[at]
            if sketch.node[node].load > 0 or node == stays:
                sketch.members[kept] = node
                kept += 1
            else:
                leave(t, sketch.sums, node)
    sketch.stage[stages].first = kept
    return kept < before


@entry(makes_arrays=True)
def draft_of_sketch(sketch: Sketch, stages: int, cuts: Ints) -> Draft:
    """The plan that was tried last, with flows."""
    count = sketch.stage[stages].first
    node, load, first = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(stages + 1, np.int64)
    seat_of, flow_at = np.empty(len(sketch.node), np.int64), np.zeros(stages, np.int64)
    for stage in range(stages + 1):
        first[stage] = sketch.stage[stage].first
    for seat in range(count):
        node[seat] = sketch.members[seat]
        load[seat] = sketch.node[node[seat]].load
        seat_of[node[seat]] = seat
    for stage in range(1, stages):
        pairs = (first[stage] - first[stage - 1]) * (first[stage + 1] - first[stage])
        flow_at[stage] = flow_at[stage - 1] + pairs
    flow = np.zeros(flow_at[stages - 1], np.int64)
    for stage in range(stages - 1):
        for at in range(sketch.stage[stage].begin, sketch.stage[stage + 1].begin):
            edge = sketch.edge[at]
            row, column = seat_of[edge.sender] - first[stage], seat_of[edge.receiver] - first[stage + 1]
            flow[flow_at[stage] + row * (first[stage + 2] - first[stage + 1]) + column] = edge.count
    return Draft(node, load, first, cuts[: stages + 1].copy(), flow, flow_at, np.full(count, -1))
