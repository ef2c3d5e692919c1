"""Finds the best plan of a small cluster with certainty: simulates every plan that no bound rules out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator, price_of
from dtfm.scheduler.cost.plan_bounds import plan_bound
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Ints, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import NO_LINK, Position, Sketch, empty_sketch
from dtfm.scheduler.model.tables import Tables
from dtfm.scheduler.search.branch_and_bound import Plans, promising

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

    The problem must be small. ``best`` is a plan found before. Loads and flows are those that evaluate.price_of makes.
    """

    def over() -> bool:
        return evaluator.spent >= evaluations or expired()

    problem = evaluator.problem
    if over():
        return best
    most = OPEN_PER_EVALUATION * (evaluations - evaluator.spent)
    may_idle = evaluator.keep_idle_hands or problem.is_mixed  # a proven node may stay in a stage that needs it
    plans = promising(problem, shape, may_idle, best.price[-1], most, expired)
    prices, bounds = priced(evaluator.tables, plans, evaluator.keep_idle_hands)
    # Good plans first, so that many others are ruled out.
    for row in np.argsort(prices, kind="stable")[: np.count_nonzero(prices < NO_LINK)].tolist():
        if over():
            break
        if bounds[row] < best.price[-1]:
            candidate = evaluator.simulated(*plans.groups_and_cuts(row))
            best = min(best, candidate, key=lambda candidate: candidate.price)
    return best


def priced(t: Tables, plans: Plans, keep_idle_hands: bool) -> tuple[Floats, Floats]:
    """What evaluate.price_of gives for each plan, and a lower bound on its simulated seconds: float64 [plans] each."""
    prices, bounds = np.full(len(plans.stages), np.inf), np.full(len(plans.stages), np.inf)
    sketch = empty_sketch(t)
    _price(t, sketch, plans.places, plans.cuts, plans.stages, keep_idle_hands, prices, bounds)
    return prices, bounds


@compiled
def _price(
    t: Tables, sketch: Sketch, places: Ints, cuts: Ints, stages: Ints, keep_idle: bool, prices: Floats, bounds: Floats
) -> None:
    for row in range(len(stages)):
        position = Position(places[row], cuts[row], stages[row : row + 1])
        prices[row] = price_of(t, position, sketch, keep_idle)
        if prices[row] < NO_LINK:
            bounds[row] = plan_bound(t, sketch, stages[row], cuts[row])
