"""Sums over the members of each stage, which change little when a node moves to another stage."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Floats, Ints, Records
from dtfm.scheduler.model.request import MOST_STAGES
from dtfm.scheduler.model.tables import Tables

AT_ONCE = 8
"""When more nodes than this have moved, each stage first gets the row of the stage that shares the most members with it."""
SLOWEST_LINK = 1e-6
"""A sum below this, in bytes per second, counts as no link: rounding may leave as much when a sum is taken apart again."""


class Sums(NamedTuple):
    """The sums for one position after another."""

    place: Ints
    """int64 [nodes]: the stage that counts the node, -1 for none."""
    stages: Ints
    """int64 [1]: the number of stages."""
    row: Ints
    """int64 [MOST_STAGES]: the sums of stage s are in row ``row[s]``. So a stage keeps its row when its number changes."""
    toward: Floats
    """float64 [MOST_STAGES, 3, nodes]: in row r, the sum of ``Tables.toward`` over the stage's members."""
    slowest: Records
    """Records SLOWEST [MOST_STAGES]."""


SPEED, EXCHANGE, LATENCY = range(3)
"""What `Tables.toward` has for a node and a member. SPEED: the bytes per second of tensors that their links carry in both
directions at the same time. EXCHANGE: the seconds per byte of both directions one after the other, times SPEED. LATENCY: of
both directions together."""
SLOWEST = np.dtype(
    [
        ("slowness", np.float64),  # seconds per byte of the slowest link among a stage's members
        ("one", np.int64),  # its ends, -1 without a link
        ("other", np.int64),
    ]
)


def empty_sums(nodes: int) -> Sums:
    """Sums for a cluster of this size, without any position."""
    return Sums(
        place=np.full(nodes, -1, np.int64),
        stages=np.zeros(1, np.int64),
        row=np.arange(MOST_STAGES, dtype=np.int64),
        toward=np.zeros((MOST_STAGES, 3, nodes)),
        slowest=np.zeros(MOST_STAGES, SLOWEST),
    )


@compiled()
def siblings_in(t: Tables, sums: Sums, stage: int, node: int) -> int:
    """The number of other nodes in the stage that share the node's line."""
    count, other = 0, t.node[node].sibling
    while other != node:
        if sums.place[other] == stage:
            count += 1
        other = t.node[other].sibling
    return count


@entry(makes_arrays=True)
def add_up(t: Tables, sums: Sums, place: Ints, stages: int) -> None:
    """Adds all sums up from the beginning, which removes rounding errors."""
    for stage in range(stages):
        sums.row[stage] = stage
        sums.toward[stage] = 0.0
    for node in range(len(place)):
        if place[node] >= 0:
            _add(t, sums, place[node], node, 1.0)
    sums.place[:] = place
    sums.stages[0] = stages
    for stage in range(stages):
        _find_slowest(t, sums, stage)


@entry()
def follow(t: Tables, sums: Sums, place: Ints, stages: int) -> None:
    """Brings the sums to another position: only nodes that have moved are taken away and added elsewhere."""
    changed = 0
    for node in range(len(place)):
        if place[node] != sums.place[node]:
            changed += 1
    if sums.stages[0] != stages or changed > AT_ONCE:
        _renumber(sums, place, stages)
    for node in range(len(place)):
        if place[node] != sums.place[node] and sums.place[node] >= 0:
            leave(t, sums, node)
    for node in range(len(place)):
        if place[node] != sums.place[node]:
            _join(t, sums, node, place[node])
    for stage in range(stages):
        if sums.slowest[sums.row[stage]].slowness < 0:
            _find_slowest(t, sums, stage)


@compiled()
def leave(t: Tables, sums: Sums, node: int) -> None:
    """Takes a node out of its stage. If its slowest link was the node's, ``slowness`` is -1 until `follow` finds the next."""
    stage = sums.place[node]
    _add(t, sums, stage, node, -1.0)
    sums.place[node] = -1
    slowest = sums.slowest[sums.row[stage]]
    if slowest.one == node or slowest.other == node:
        slowest.slowness = -1.0


@compiled()
def _join(t: Tables, sums: Sums, node: int, stage: int) -> None:
    _add(t, sums, stage, node, 1.0)
    slowest = sums.slowest[sums.row[stage]]
    if slowest.slowness >= 0:
        for other in range(len(sums.place)):
            if sums.place[other] == stage and t.slower[node, other] > slowest.slowness:
                slowest.slowness, slowest.one, slowest.other = t.slower[node, other], node, other
    sums.place[node] = stage


@compiled()
def _add(t: Tables, sums: Sums, stage: int, node: int, sign: float) -> None:
    own, more = sums.toward[sums.row[stage]], t.toward[node]
    for kind in range(own.shape[0]):
        for other in range(own.shape[1]):
            own[kind, other] += sign * more[kind, other]


@compiled(makes_arrays=True)
def _find_slowest(t: Tables, sums: Sums, stage: int) -> None:
    slowest = sums.slowest[sums.row[stage]]
    slowest.slowness, slowest.one, slowest.other = 0.0, -1, -1
    members = np.flatnonzero(sums.place == stage)
    for at, one in enumerate(members):
        for other in members[at + 1 :]:
            if slowest.one < 0 or t.slower[one, other] > slowest.slowness:
                slowest.slowness, slowest.one, slowest.other = t.slower[one, other], one, other


@compiled(makes_arrays=True)
def _renumber(sums: Sums, place: Ints, stages: int) -> None:
    """Gives each stage the row of the old stage that has most of its members now, if no other stage has the row yet. The others
    begin empty."""
    before = sums.stages[0]
    common = np.zeros((stages, before), np.int64)
    for node in range(len(place)):
        if place[node] >= 0 and sums.place[node] >= 0:
            common[place[node], sums.place[node]] += 1
    rows, number, taken = np.empty(stages, np.int64), np.full(before, -1), np.zeros(len(sums.row), np.bool_)
    for stage in range(stages):
        rows[stage] = -1
        best = common[stage].argmax() if before > 0 else 0
        if before > 0 and common[stage, best] > 0:
            rows[stage] = sums.row[best]
            taken[rows[stage]] = True
            number[best] = stage
            common[:, best] = 0
    free = 0
    for stage in range(stages):
        if rows[stage] < 0:
            while taken[free]:
                free += 1
            rows[stage] = free
            taken[free] = True
            sums.toward[free] = 0.0
            sums.slowest[free].slowness = -1.0
    for node in range(len(place)):
        if sums.place[node] >= 0:
            sums.place[node] = number[sums.place[node]]
    sums.row[:stages] = rows
    sums.stages[0] = stages
