"""Finds the best plan of a small cluster with certainty: simulates every plan that no bound rules out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.cost.plan_bounds import plan_bounds
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.search.branch_and_bound import promising

MOST_NODES = 8
"""Largest number of nodes. Eight form 255 possible groups per stage, whose combinations are bounded within a second."""
MOST_LAYERS = 48
"""Largest number of layers."""
OPEN_PER_EVALUATION = 4
"""Number of partial plans of one length that are continued, per evaluation left in the budget."""


def is_small(problem: Problem) -> bool:
    """Whether ``improve`` is fast enough for this problem."""
    nodes, layers = len(problem.flops), len(problem.activation)
    return nodes <= MOST_NODES and layers <= MOST_LAYERS and problem.cluster.copies == 1


def improve(
    evaluator: Evaluator, shape: Shape, best: Candidate, evaluations: int, expired: Callable[[], bool]
) -> Candidate:
    """The best plan over all groups and cuts, as far as time and the budget of ``evaluations`` in total suffice.

    The problem must be small. ``best`` is a plan found before. Flows are those that flows.connected makes for the groups.
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
