"""What moves between nodes when one plan follows another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtfm.scheduler.plan import Plan
from dtfm.scheduler.problem import Problem


@dataclass(frozen=True, slots=True)
class Move:
    """A node that gets the state of layers that it does not hold yet."""

    node: str
    layers: tuple[int, ...]
    bytes: float


def moves(problem: Problem, old: Plan, new: Plan) -> tuple[Move, ...]:
    """What every node of the new plan must fetch: weights and optimizer state, no gradients."""
    factor = problem.state_factor - 1.0
    parameters = np.diff(problem.parameters_before) * factor
    held = {node: range(*stage.layers) for stage in old.stages for node in stage.replicas}
    result = []
    for stage in new.stages:
        for node in stage.replicas:
            layers = tuple(layer for layer in range(*stage.layers) if layer not in held.get(node, range(0)))
            if layers:
                result.append(Move(node, layers, float(sum(parameters[layer] for layer in layers))))
    return tuple(result)


def migration_seconds(problem: Problem, old: Plan, new: Plan) -> float:
    """Seconds until the last node has its state, every layer coming from all its old holders that are still there.

    A node receives from all donors at once; a donor's connection is shared by those that ask it. A layer without a living,
    reachable donor comes from the checkpoint and costs nothing here.
    """
    number = {name: index for index, name in enumerate(problem.cluster.ids)}
    parameters = np.diff(problem.parameters_before) * (problem.state_factor - 1.0)
    donors = [
        [
            number[node]
            for stage in old.stages
            if layer in range(*stage.layers)
            for node in stage.replicas
            if node in number
        ]
        for layer in range(len(parameters))
    ]
    sent, received = np.zeros(len(number)), np.zeros(len(number))
    slowest = 0.0
    for move in moves(problem, old, new):
        receiver = number[move.node]
        links: dict[int, float] = {}
        for layer in move.layers:
            able = [donor for donor in donors[layer] if np.isfinite(problem.slowness[donor, receiver])]
            speeds = np.array([1.0 / problem.slowness[donor, receiver] for donor in able])
            for donor, speed in zip(able, speeds, strict=True):
                links[donor] = links.get(donor, 0.0) + float(parameters[layer] * speed / speeds.sum())
        for donor, size in links.items():
            sent[donor] += size
            received[receiver] += size
            slowest = max(slowest, float(problem.latency[donor, receiver] + size * problem.slowness[donor, receiver]))
    with np.errstate(invalid="ignore", divide="ignore"):
        connections = np.concatenate([sent / problem.up, received / problem.down])
    return max(slowest, float(np.nanmax(connections, initial=0.0)))
