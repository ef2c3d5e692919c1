"""The memory model once more, layer by layer: slow, and sharing no code with model/keeping.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState, in_flight
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.workload import Workload


@dataclass(frozen=True)
class Kept:
    """The memory that a node needs for layers: bytes on its device that do not grow, bytes per micro-batch in flight, bytes in
    the host's memory, and forward passes per micro-batch."""

    keeping: Keeping
    fixed: float
    each: float
    host: float
    passes: float
    update: float
    """Seconds of each step when gradients and weights pass the bus of a node that has a host's memory beside its own."""

    def lacking(self, problem: Problem, node: int, held: int) -> float:
        """Bytes that are missing in the memory that is shortest."""
        member = problem.cluster.nodes[node]
        device = self.fixed + held * self.each
        if member.host_memory_bytes is None:
            return device + self.host - member.memory_bytes
        return max(device - member.memory_bytes, self.host - member.host_memory_bytes)

    def room(self, problem: Problem, node: int) -> float:
        """Bytes for micro-batches in flight."""
        member = problem.cluster.nodes[node]
        return member.memory_bytes - self.fixed - (self.host if member.host_memory_bytes is None else 0.0)


ORDER = (
    Keeping(Checkpointing.NONE, OptimizerState.DEVICE),
    Keeping(Checkpointing.LAYER, OptimizerState.DEVICE),
    Keeping(Checkpointing.NONE, OptimizerState.HOST),
    Keeping(Checkpointing.LAYER, OptimizerState.HOST),
)


def kept(workload: Workload, first: int, past_last: int, keeping: Keeping) -> Kept:
    layers = workload.layers[first:past_last]
    parameters = sum(layer.parameter_bytes for layer in layers)
    copy = parameters * workload.copy_bytes_per_parameter_byte
    optimizer = parameters * workload.optimizer_bytes_per_parameter_byte
    outputs = [
        16.0 * layer.activation_bytes if layer.kept_bytes is None else layer.kept_bytes for layer in workload.layers
    ][first:past_last]
    if keeping.optimizer_state is OptimizerState.DEVICE:
        state, host, update = parameters + copy + parameters + optimizer, 0.0, 0.0
    else:
        state, host = (copy if copy else parameters) + parameters, parameters + optimizer
        update = (parameters + (copy if copy else parameters)) / 12e9
    state += sum(layer.frozen_bytes for layer in layers)
    passes = 1 + workload.backward_per_forward
    if keeping.checkpointing is Checkpointing.NONE:
        working = max(layer.working_bytes for layer in layers)
        return Kept(keeping, state + working, sum(outputs), host, passes, update)
    again = max(layer.working_bytes + output for layer, output in zip(layers, outputs, strict=True))
    inputs = sum(workload.layers[number - 1].activation_bytes for number in range(first, past_last) if number > 0)
    return Kept(keeping, state + again, inputs, host, passes + 1, update)


def allowed(problem: Problem, first: int, past_last: int) -> list[Kept]:
    workload = problem.workload
    return [
        kept(workload, first, past_last, keeping)
        for keeping in ORDER
        if workload.checkpointing in (None, keeping.checkpointing)
        and workload.optimizer_state in (None, keeping.optimizer_state)
    ]


def chosen(problem: Problem, draft: Draft, stage: int, node: int) -> Kept:
    """The draft's way, if it says one. Otherwise the first way that has room for the fewest micro-batches in flight. Otherwise
    the last way."""
    if (way := draft.way[draft.node == node][0]) >= 0:
        return kept(problem.workload, draft.cuts[stage], draft.cuts[stage + 1], ORDER[way])
    ways = allowed(problem, draft.cuts[stage], draft.cuts[stage + 1])
    held = min(in_flight(stage, len(draft.groups)), problem.workload.micro_batches)
    return next((way for way in ways if way.lacking(problem, node, held) < 1.0), ways[-1])


def slowest_update(problem: Problem, draft: Draft) -> float:
    """The seconds of the slowest node. Nodes that compute in their host's own memory take none."""
    return max(
        chosen(problem, draft, stage, node).update if problem.host_memory[node] else 0.0
        for stage, group in enumerate(draft.groups)
        for node in group
    )


def shortfall(problem: Problem, draft: Draft) -> float:
    """The bytes that the worst node lacks; 0 when it lacks less than one."""
    lacking = max(
        min(way.lacking(problem, node, held) for way in allowed(problem, draft.cuts[stage], draft.cuts[stage + 1]))
        for stage, group in enumerate(draft.groups)
        for held in [min(in_flight(stage, len(draft.groups)), problem.workload.micro_batches)]
        for node in group
    )
    return lacking if lacking >= 1.0 else 0.0


def with_ways(rng: np.random.Generator, problem: Problem) -> Problem:
    """The unchanged problem, or the problem with any ways to keep what nodes need, kept and working bytes, hosts, and frozen
    weights."""
    rng = rng.spawn(1)[0]  # so that it draws what it would draw otherwise
    if rng.random() < 0.5:
        return problem
    cluster, workload = problem.cluster, problem.workload
    nodes = tuple(
        replace(node, host_memory_bytes=None if rng.random() < 0.3 else 10 ** rng.uniform(7.5, 10))
        for node in cluster.nodes
    )
    layers = tuple(
        replace(
            layer,
            kept_bytes=None if rng.random() < 0.5 else layer.activation_bytes * rng.uniform(0.5, 40),
            working_bytes=0.0 if rng.random() < 0.3 else layer.activation_bytes * rng.uniform(0, 20),
        )
        for layer in workload.layers
    )
    modes = [None, *Checkpointing], [None, *OptimizerState]
    made = replace(
        workload,
        layers=layers,
        copy_bytes_per_parameter_byte=float(rng.choice([0.0, 0.5])),
        checkpointing=modes[0][rng.integers(0, 3)],
        optimizer_state=modes[1][rng.integers(0, 3)],
    )
    if rng.random() < 0.3:
        layers = tuple(replace(layer, frozen_bytes=layer.parameter_bytes * rng.uniform(0, 4)) for layer in layers)
        made = replace(made, layers=layers, backward_per_forward=rng.uniform(1.0, 2.0))
    return Problem(replace(cluster, nodes=nodes), made)
