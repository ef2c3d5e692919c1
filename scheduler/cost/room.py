"""The memory that a change of plan takes on each node, and the cost of freeing some first.

While plans change, a node holds two stages: its old one, which others may still fetch from it, and its new one. No micro-batch
is in flight then. Layers in both stages count once in the device's memory, if their state is there before and after; the same
holds for the host's memory.

A node that lacks room for both stages frees memory first. For the layers that only the old stage has, it drops the gradients
and the copy of the weights. Others may need the weights and moments: the node moves these to the host's memory, or to its disk
if the host has no room. Then it loads its new stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.keeping import ENOUGH
from dtfm.scheduler.model.memory import BUS_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Floats, Ints, Problem

DEVICE, HOST = range(2)
"""Where a stage's state is (memory.OptimizerState), by number; also the device's memory, and the host's."""


class Room(NamedTuple):
    """The stages that nodes hold, and their memory, for compiled functions."""

    seat: Ints
    """int64 [nodes, 3]: the first and past-last layer of the node's stage, and where its state is. Two equal layers: no stage."""
    before: Floats
    """float64 [2, 2, layers + 1], ``before[where, memory, k]``: the bytes that the state of layers [0, k) takes, if it is
    ``where``, of the device's (0) or the host's (1) memory."""
    moved_before: Floats
    """float64 [layers + 1]: the bytes of weights and moments of layers [0, k)."""
    memory: Floats
    """float64 [nodes, 2]: the device's and the host's bytes. The host's are 0 where the device computes in the host's memory."""
    wheres: Ints
    """int64 [2]: where the workload allows state to be."""


class Freeing(NamedTuple):
    """A node that frees first: by its number, the bytes that it lacks, and the seconds that it takes."""

    node: int
    lacks: float
    seconds: float


@compiled()
def lacking_during(room: Room, node: int, first: int, past_last: int, where: int) -> float:
    """The bytes that the node lacks to hold its old stage beside layers [first, past_last); 0 or less where it has room."""
    old_first, old_past, was = room.seat[node, 0], room.seat[node, 1], room.seat[node, 2]
    if old_first == old_past or (old_first == first and old_past == past_last and was == where):
        return 0.0
    device = _both(room, 0, old_first, old_past, was, first, past_last, where)
    host = _both(room, 1, old_first, old_past, was, first, past_last, where)
    if room.memory[node, 1] == 0.0:
        return float(device + host - room.memory[node, 0])
    return float(max(device - room.memory[node, 0], host - room.memory[node, 1]))


@compiled()
def _both(
    room: Room, memory: int, old_first: int, old_past: int, was: int, first: int, past_last: int, where: int
) -> float:
    """The bytes that both stages take together, of the device's memory or of the host's."""
    held = room.before[was, memory, old_past] - room.before[was, memory, old_first]
    added = room.before[where, memory, past_last] - room.before[where, memory, first]
    begin, end = max(old_first, first), min(old_past, past_last)
    if begin >= end:
        return float(held + added)
    known = room.before[was, memory, end] - room.before[was, memory, begin]
    wanted = room.before[where, memory, end] - room.before[where, memory, begin]
    return float(held + added - min(known, wanted))


@entry()
def freeing_seconds(room: Room, node: int, first: int, past_last: int, where: int) -> float:
    """Seconds that the node takes to move away the state that layers [first, past_last), its new stage, do not need."""
    old_first, old_past, was = room.seat[node, 0], room.seat[node, 1], room.seat[node, 2]
    begin, end = max(old_first, first), min(old_past, past_last)
    moved = room.moved_before[old_past] - room.moved_before[old_first]
    beside = room.before[was, 1, old_past] - room.before[was, 1, old_first]  # in the host's memory already
    if begin < end:
        moved -= room.moved_before[end] - room.moved_before[begin]
        beside -= room.before[was, 1, end] - room.before[was, 1, begin]
    if was == 1:
        moved = 0.0
    left = room.memory[node, 1] - beside - (room.before[where, 1, past_last] - room.before[where, 1, first])
    if room.memory[node, 1] == 0.0 or left < moved:
        return float((moved + beside) / DISK_BYTES_PER_SECOND)
    return float(moved / BUS_BYTES_PER_SECOND)


@compiled()
def roughly_freeing(room: Room, node: int, first: int, past_last: int) -> float:
    """`freeing_seconds` if the node has to free memory first, else -1. Assumes that its state is on the device if the device
    has room for that state alone."""
    if room.seat[node, 0] == room.seat[node, 1]:
        return -1.0
    where = 0 if room.wheres[0] == 1 else 1
    if where == 0 and room.wheres[1] == 1:
        alone = room.before[0, 0, past_last] - room.before[0, 0, first]
        if room.memory[node, 1] == 0.0:
            alone += room.before[0, 1, past_last] - room.before[0, 1, first]
        if alone > room.memory[node, 0]:
            where = 1
    if lacking_during(room, node, first, past_last, where) < ENOUGH:
        return -1.0
    return float(freeing_seconds(room, node, first, past_last, where))


@entry(makes_arrays=True)
def shortages(room: Room, seats: Ints) -> Floats:
    """By row of ``seats`` (node, first, past_last, where), the bytes that the node lacks, and the seconds to free: [seats, 2]."""
    found = np.zeros((len(seats), 2))
    for row in range(len(seats)):
        node, first, past_last, where = seats[row, 0], seats[row, 1], seats[row, 2], seats[row, 3]
        found[row, 0] = lacking_during(room, node, first, past_last, where)
        found[row, 1] = freeing_seconds(room, node, first, past_last, where)
    return found


def freeing(room: Room, seats: Iterable[tuple[int, int, int, int]]) -> tuple[Freeing, ...]:
    """The nodes that have to free memory first to take these ``seats`` (see `shortages`), by number."""
    rows = np.array(sorted(seats), dtype=np.int64).reshape(-1, 4)
    found = shortages(room, rows)
    return tuple(
        Freeing(int(rows[row, 0]), float(found[row, 0]), float(found[row, 1]))
        for row in np.flatnonzero(found[:, 0] >= ENOUGH)
    )


def place_of(keeping: Keeping) -> int:
    return DEVICE if keeping.optimizer_state is OptimizerState.DEVICE else HOST


def room_of(problem: Problem, plan: Plan) -> Room:
    """What the problem's nodes hold under ``plan``: nothing if the plan is for a model with another number of layers."""
    seat = np.zeros((len(problem.flops), 3), dtype=np.int64)
    numbers = {name: number for number, name in enumerate(problem.cluster.ids)}
    for stage in plan.stages if plan.stages[-1].layers[1] == len(problem.activation) else ():
        for place, name in enumerate(stage.replicas):
            if name in numbers:
                seat[numbers[name]] = *stage.layers, place_of(stage.keeping[place] if stage.keeping else Keeping())
    workload, size = problem.workload, problem.parameters_before
    orthogonal = problem.orthogonal_before
    on_device = workload.kept_on_device(size, orthogonal), size * workload.for_exchanges_per_parameter_byte
    in_host = workload.kept_beside_host(size, orthogonal), workload.kept_on_host(size, orthogonal)
    before = np.array([on_device, in_host])
    before[:, DEVICE] += problem.frozen_before  # which the node reads again: nobody fetches them from it
    return Room(
        seat,
        np.ascontiguousarray(before),
        size * (1.0 + workload.optimizer_bytes_per_parameter_byte) - orthogonal,
        np.column_stack([problem.memory, problem.host_memory]),
        np.array([any(place_of(way) == where for way in workload.ways) for where in (DEVICE, HOST)], dtype=np.int64),
    )


def empty_room(nodes: int, layers: int) -> Room:
    """A room in which no node holds anything."""
    return Room(
        np.zeros((nodes, 3), dtype=np.int64),
        np.zeros((2, 2, layers + 1)),
        np.zeros(layers + 1),
        np.zeros((nodes, 2)),
        np.ones(2, dtype=np.int64),
    )
