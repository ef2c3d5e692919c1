"""The paper's cost model (arXiv 2206.01288, sections 3.2 and 3.3), in its own units: gigabytes, and one step of equal stages."""

from __future__ import annotations

import itertools

import numpy as np

from dtfm.scheduler.assemble.matching import bottleneck_cost
from dtfm.scheduler.model.decision import PaperSeconds
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.workload import PaperCosts

GIGABYTE = 1e9
"""Bytes."""


def gradient_exchange(problem: Problem, costs: PaperCosts) -> Floats:
    """Seconds [nodes, nodes] in which two members of a group exchange shards: both latencies, and a shard each way.

    Zero on the diagonal, infinite where either direction does not exist.
    """
    return _exchange(problem, costs.gradient_gigabytes * GIGABYTE / costs.replicas)


def activation_exchange(problem: Problem, costs: PaperCosts) -> Floats:
    """Seconds [nodes, nodes] to send a pipeline's activations forward and their gradients back; zero on the diagonal."""
    return _exchange(problem, costs.activation_gigabytes * GIGABYTE)


def _exchange(problem: Problem, size: float) -> Floats:
    exchange = problem.exchange(size)
    np.fill_diagonal(exchange, 0.0)
    return exchange


def group_seconds(gradients: Floats, group: Ints) -> float:
    """Data-parallel cost of one group: the slowest member's sum over all others."""
    return float(gradients[np.ix_(group, group)].sum(axis=1).max())


def paper_seconds(problem: Problem, groups: Groups) -> PaperSeconds:
    """The cost of equal groups in this pipeline order.

    Raises ValueError unless the workload has ``paper`` costs of this shape.
    """
    costs = problem.workload.paper
    if costs is None:
        raise ValueError("the workload has no `paper` costs, which the paper's cost model needs")
    shape = (len(groups), *{len(group) for group in groups})
    if shape != (costs.stages, costs.replicas):
        sizes = [len(group) for group in groups]
        raise ValueError(
            f"groups of sizes {sizes} are not the {costs.stages} stages of {costs.replicas} that `paper` names"
        )
    gradients, activations = gradient_exchange(problem, costs), activation_exchange(problem, costs)
    members = [np.array(group) for group in groups]
    return PaperSeconds(
        data_parallel=max(group_seconds(gradients, group) for group in members),
        pipeline=sum(bottleneck_cost(activations[np.ix_(a, b)]) for a, b in itertools.pairwise(members)),
    )
