"""Whether proven nodes can have a part in every stage. Those that are not proven only add replicas then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.search.search import Budget, TimeUsed, search
from dtfm.scheduler.search.seeds import Start

PART = 0.2
"""Fraction of a search's budget for this one, if it finds nothing; usually one of the first seeds works."""
MOST_STEPS = 25_000
"""Of a search without a budget."""


def proven_alone(
    problem: Problem,
    shape: Shape,
    seed: int,
    time_used: TimeUsed | None,
    evaluations: int | None,
    stopped: Callable[[], bool],
) -> Start | None:
    """Where a search may start that gives each stage a proven node: a plan that proven nodes alone can train. None: there is
    none, or none was found in this search's part of the budget.

    A plan that has a proven node in each stage is one of these with further replicas, except where only the others' links connect
    its stages.
    """
    numbers = np.flatnonzero(problem.proven)
    stages = shape.stages if shape.sizes is None else len(shape.sizes)
    state = problem.parameters_before[-1] * problem.workload.least_device_bytes_per_parameter_byte
    if (stages or 1) > len(numbers) or problem.memory[numbers].sum() < state:
        return None
    alone = Problem(problem.cluster.only(numbers.tolist()), problem.workload)
    evaluator = Evaluator(alone, keep_idle_hands=False)
    budget = Budget(
        None if time_used is None else lambda: time_used() / PART,
        MOST_STEPS if evaluations is None else int(PART * evaluations),
        lambda: evaluator.best < np.inf or stopped(),
    )
    free = Shape(stages=stages, most_stages=min(shape.most_stages, len(numbers)))
    found, _ = search(evaluator, free, [], None, Random(seed), budget)
    if not found.feasible:
        return None
    groups = tuple(tuple(int(numbers[node]) for node in group) for group in found.draft.groups)
    if shape.sizes is not None:
        groups = _filled(problem, groups, shape.sizes)
    return groups, found.draft.cuts


def without_marks(cluster: Cluster) -> Cluster:
    """The cluster as if all its nodes were proven."""
    return replace(cluster, nodes=tuple(replace(node, proven=True) for node in cluster.nodes))


def _filled(problem: Problem, groups: Groups, sizes: tuple[int, ...]) -> Groups:
    """The groups with so many nodes each: the fastest that they have, then others, first proven ones."""
    order = sorted(range(len(problem.flops)), key=lambda node: (not problem.proven[node], -problem.flops[node], node))
    made = [[node for node in order if node in group][:size] for group, size in zip(groups, sizes, strict=True)]
    used = {node for group in made for node in group}
    spare = [node for node in order if node not in used]
    for group, size in zip(made, sizes, strict=True):
        lacking = size - len(group)
        group += spare[:lacking]
        del spare[:lacking]
    return tuple(tuple(sorted(group)) for group in made)
