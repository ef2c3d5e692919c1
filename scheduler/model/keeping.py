"""The memory model: what a node needs for its layers, and how it keeps that.

For layers [a, b) with h micro-batches in flight, a device keeps activations in one of two ways (memory.Checkpointing):

- NONE: h times what all layers keep, and once the most that any of them works with.
- LAYER: h times the inputs of all layers, and once the most that any layer keeps and works with: the backward pass computes one
  layer at a time again. All layers of a stage are alike in this, also the model's last layer (the head). The input of layer 0
  is token ids, which count as nothing. A micro-batch costs one forward pass more, which counts as a part of the backward pass:
  if all weights are trained, 4 instead of 3.

A node keeps the state, in bytes per byte of parameters, in one of two ways (memory.OptimizerState):

Frozen weights are on the device in both cases, and no part of the state.

- DEVICE: weights, gradients, optimizer state, and a copy of the weights to compute with if there is one.
- HOST: on the device weights to compute with, and gradients. In the host's memory weights and optimizer state. Where the device
  computes in the host's own memory, both are there. Otherwise gradients pass the bus at the end of each step, and weights to
  compute with come back: `update_seconds`.

In a run with rounds, the host's memory also has what exchanges need, in both cases.

The model reserves nothing for snapshots. A node writes and reads them a few MiB at a time. It copies state that training is
about to change to memory only if the host has some to spare, otherwise to its disk (node/state/images.py).

Each node takes the first way of memory.LADDER that the workload allows and that has room for the fewest micro-batches in flight
(memory.in_flight, and never more than a step has). A draft may say otherwise (Draft.way). All code that makes or judges plans
asks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.memory import LADDER, Keeping
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.tables import Tables, tables

ENOUGH = 1.0
"""Bytes that a node may lack: rounding errors."""


class Need(NamedTuple):
    """What layers need in one way."""

    fixed: float
    """Bytes on the device, however many micro-batches are in flight."""
    each: float
    """Bytes on the device per micro-batch in flight."""
    host: float
    """Bytes in the host's memory."""
    passes: float
    """The forward passes that a micro-batch costs, its backward pass included."""
    way: int
    """The way's place in memory.LADDER."""


@entry()
def need(t: Tables, way: int, first: int, past_last: int) -> Need:
    """What layers [first, past_last) need in this way."""
    begin, end = t.layer[first], t.layer[past_last]
    checkpointed = way & 1
    each = end.inputs_before - begin.inputs_before if checkpointed else end.kept_before - begin.kept_before
    level = 0
    while 2 << level <= past_last - first:
        level += 1
    last = past_last - (1 << level)
    working = max(t.working[level, first, checkpointed], t.working[level, last, checkpointed])
    if way & 2:
        state = end.beside_host_before - begin.beside_host_before
        host = end.host_before - begin.host_before
    else:
        state, host = end.state_before - begin.state_before, end.outer_before - begin.outer_before
    return Need(state + working, each, host, t.passes + checkpointed, way)


@entry()
def lacking(wanted: Need, held: float, memory: float, host_memory: float) -> float:
    """The bytes that a node lacks for ``held`` micro-batches in flight, in the memory that is shortest; 0 or less if the node
    has room. ``host_memory`` is 0 where the device computes in the host's own memory."""
    device = wanted.fixed + held * wanted.each
    if host_memory == 0.0:
        return float(device + wanted.host - memory)
    return float(max(device - memory, wanted.host - host_memory))


@compiled()
def room(wanted: Need, memory: float, host_memory: float) -> float:
    """The bytes that such a node has for micro-batches in flight; below 0 if it lacks memory even without any."""
    return float(memory - wanted.fixed - (wanted.host if host_memory == 0.0 else 0.0))


@compiled()
def update_seconds(t: Tables, wanted: Need, host_memory: float) -> float:
    """Seconds of each step that the bus of such a node is busy with gradients and weights. 0 if the device keeps all, or
    computes in the host's own memory."""
    return 0.0 if host_memory == 0.0 or not wanted.way & 2 else wanted.host * t.update_seconds_per_byte


@entry()
def first_need(t: Tables, first: int, past_last: int) -> Need:
    """What layers [first, past_last) need in the first way that the workload allows. It is the same for all nodes of a stage."""
    return need(t, t.first_way, first, past_last)


@compiled()
def every_need(t: Tables, first: int, past_last: int) -> tuple[Need, Need, Need, Need]:
    """What layers [first, past_last) need in each way of memory.LADDER. If the workload does not allow a way, the need of the
    way before stands in its place, or of the first way. For loops over nodes that ask for all of them."""
    one = need(t, t.first_way, first, past_last)
    two = need(t, 1, first, past_last) if (t.ways >> 1) & 1 else one
    three = need(t, 2, first, past_last) if (t.ways >> 2) & 1 else two
    four = need(t, 3, first, past_last) if (t.ways >> 3) & 1 else three
    return one, two, three, four


@compiled()
def is_first(ways: int, cheapest: Need, held: float, memory: float, host_memory: float) -> bool:
    """Whether a node with these memories takes the first way, whose need is the ``cheapest``, of the ``ways`` of Tables.

    Loops over nodes ask this before `chosen`: it takes no arrays, whose references would be counted.
    """
    return ways == 1 << cheapest.way or lacking(cheapest, held, memory, host_memory) < ENOUGH


@compiled()
def chosen(t: Tables, cheapest: Need, first: int, past_last: int, held: float, node: int) -> Need:
    """What layers [first, past_last) need as the node keeps them: in the last way if none has room. ``cheapest`` is their
    first_need, and ``held`` the fewest micro-batches in flight."""
    memory, host_memory = t.node[node].memory, t.node[node].host_memory
    wanted = cheapest
    if is_first(t.ways, cheapest, held, memory, host_memory):
        return wanted
    for way in range(t.first_way + 1, 4):
        if (t.ways >> way) & 1:
            wanted = need(t, way, first, past_last)
            if lacking(wanted, held, memory, host_memory) < ENOUGH:
                break
    return wanted


@entry()
def as_kept(t: Tables, way: int, cheapest: Need, first: int, past_last: int, held: float, node: int) -> Need:
    """What layers [first, past_last) need in this way. With ``way`` -1 the node chooses: see `chosen`."""
    return chosen(t, cheapest, first, past_last, held, node) if way < 0 else need(t, way, first, past_last)


@compiled()
def least_lacking(t: Tables, cheapest: Need, first: int, past_last: int, held: float, node: int) -> float:
    """The bytes that the node lacks in the way that lacks least; below ENOUGH if it has room. Arguments as for `chosen`."""
    memory, host_memory = t.node[node].memory, t.node[node].host_memory
    least = lacking(cheapest, held, memory, host_memory)
    if least < ENOUGH:
        return least
    for way in range(t.first_way + 1, 4):
        if (t.ways >> way) & 1:
            least = min(least, lacking(need(t, way, first, past_last), held, memory, host_memory))
    return least


class Held(NamedTuple):
    """What a node of a plan keeps, and with how many micro-batches in flight: bytes on the device and in the host's memory."""

    keeping: Keeping
    device_bytes: float
    host_bytes: float


def held_by(
    problem: Problem, layers: tuple[int, int], in_flight: int, held: int, node: int, keeping: Keeping | None = None
) -> Held:
    """What the node keeps for ``layers`` with ``held`` micro-batches in flight, when ``in_flight`` are the fewest that it may
    have. ``keeping`` is the way; None: the way that the node chooses."""
    t = tables(problem)
    way = -1 if keeping is None else LADDER.index(keeping)
    wanted = as_kept(t, way, first_need(t, *layers), *layers, float(in_flight), node)
    return Held(LADDER[wanted.way], wanted.fixed + held * wanted.each, wanted.host)


@dataclass(frozen=True, slots=True)
class Short:
    """A node's shortest memory for some layers, in the way that lacks least: ``bytes`` of the ``needed`` ones are missing, 0 if
    it has room for all."""

    node: int
    layers: tuple[int, int]
    in_host: bool
    needed: float
    bytes: float

    @property
    def memory(self) -> str:
        return "host memory" if self.in_host else "device memory"


def shortest(problem: Problem, layers: Sequence[int], held: int, node: int) -> Short:
    """What the node lacks most for layers [layers[0], layers[1]) with ``held`` micro-batches in flight."""
    t, (first, past_last) = tables(problem), layers
    ways = [need(t, LADDER.index(way), first, past_last) for way in problem.workload.ways]
    memory, host_memory = float(problem.memory[node]), float(problem.host_memory[node])
    wanted = min(ways, key=lambda way: lacking(way, float(held), memory, host_memory))
    lacks, beside = lacking(wanted, float(held), memory, host_memory), host_memory > 0
    device = wanted.fixed + held * wanted.each + (0.0 if beside else wanted.host)
    in_host = beside and device - memory < lacks
    return Short(
        node, (first, past_last), in_host, wanted.host if in_host else device, lacks if lacks >= ENOUGH else 0.0
    )


def keepings(problem: Problem, draft: Draft) -> tuple[tuple[Keeping, ...], ...]:
    """How each node of the draft keeps what it needs: by stage, by replica."""
    return tuple(tuple(LADDER[wanted.way] for _, wanted, _ in stage) for stage in _needs(problem, draft))


def has_room(problem: Problem, draft: Draft) -> bool:
    """Whether every node has memory for its layers and micro-batches in the draft, kept in the node's way."""
    return all(
        lacking(wanted, held, float(problem.memory[node]), float(problem.host_memory[node])) < ENOUGH
        for stage in _needs(problem, draft)
        for node, wanted, held in stage
    )


def _needs(problem: Problem, draft: Draft) -> Iterator[list[tuple[int, Need, float]]]:
    """By stage: each node, its need in its way, and the fewest micro-batches in flight."""
    t, stages = tables(problem), len(draft.cut) - 1
    split = zip(draft.groups, pairwise(draft.cuts), np.split(draft.way, draft.first[1:-1]), strict=True)
    for stage, (group, layers, ways) in enumerate(split):
        held, cheapest = float(min(t.least_held[stages, stage], t.micro_batches)), first_need(t, *layers)
        yield [
            (node, as_kept(t, way, cheapest, *layers, held, node), held)
            for node, way in zip(group, ways.tolist(), strict=True)
        ]
