"""The best plan of a small cluster for certain: every plan that a bound does not rule out is simulated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.cost.plan_bounds import plan_bounds
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.search.branch_and_bound import promising

MOST_NODES = 8
"""Eight have 255 possible groups for a stage, and a second is enough to know which of them go together."""
MOST_LAYERS = 48


OPEN_PER_EVALUATION = 4
"""Begun plans of one length that are weighed, per evaluation that is left."""


def is_small(problem: Problem) -> bool:
    """Whether improve is fast."""
    nodes, layers = len(problem.flops), len(problem.activation)
    return nodes <= MOST_NODES and layers <= MOST_LAYERS and problem.cluster.copies == 1


def improve(
    evaluator: Evaluator, shape: Shape, best: Candidate, evaluations: int, expired: Callable[[], bool]
) -> Candidate:
    """The best of all groups and cuts where ``evaluations`` in all, and the time, are enough; ``best`` is a plan found before.

    The cluster must be small. Routes are those that routes.route makes for the groups.
    """

    def over() -> bool:
        return evaluator.spent >= evaluations or expired()

    problem = evaluator.problem
    if over():
        return best
    most = OPEN_PER_EVALUATION * (evaluations - evaluator.spent)
    for bound, groups, cuts in promising(problem, shape, evaluator.keep_idle_hands, best.price[-1], most, expired):
        if bound >= best.price[-1] or over():
            break
        if plan_bounds(problem, groups, np.array([cuts]))[0] < best.price[-1]:
            best = min(best, evaluator.simulated(groups, cuts), key=lambda candidate: candidate.price)
    return best
