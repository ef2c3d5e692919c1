"""The search over which nodes hold which stage (arXiv 2206.01288, section 3.4, with other means)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.cost.state_transfer import Fetching, nothing_to_fetch
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import Position, cuts_of, empty_position, empty_sketch, groups_of, position_of
from dtfm.scheduler.search.anneal import HOT, Found, anneal
from dtfm.scheduler.search.exact import improve, is_small
from dtfm.scheduler.search.moves import Rules
from dtfm.scheduler.search.rising_bound import RisingBound
from dtfm.scheduler.search.seeds import Start, nearest_nodes, random_groups, seed_groups
from dtfm.scheduler.search.walk import walk

TimeUsed = Callable[[], float]
"""Returns the fraction of the time that is used up; the search ends at 1."""

WALKS_TIMES_NODES = 320
"""Walks of a round, times nodes: chance decides more on small clusters, patience on large ones."""
FEWEST_WALKS, MOST_WALKS = 2, 20
SEEDING = 0.1
"""Largest fraction of the budget for seeds, if one of them works."""
WALKING = 0.85
"""Fraction of the budget for walks; the rest is for simulations."""
WALKING_SMALL = 0.25
"""The same on a small cluster, where the exact search gets the rest."""
FIRST_ROUND = 25_000
"""Steps of the first round without a limit, and STEPS_PER_NODE more per node. Each further round has twice as many."""
STEPS_PER_NODE = 500
WORTH = 0.005
"""Least fraction of the step that a round must save for another to follow."""
WARM = 0.004
"""First heat of walks that start from good plans: the incumbent, or the best of other walks."""
FINAL = 0.3
"""Fraction of the walks for those that start again from the best of the others."""
FINALISTS = 12
"""Number of positions that are simulated at the end."""
SETTLED = 2
"""Number of them whose cuts are shifted by simulation while that helps."""
POLISHES, MOST_POLISHES = 50, 5_000
"""Number of short walks from the best plan at the end, judged by simulation; the larger one where time runs out before."""
POLISHING_STEPS = 40
POLISHING_HEAT = 0.001
EXACT_BUDGET = 4_000
"""Simulations of the exact search without a limit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to search: until ``time_used`` gives 1, or for ``steps``; with neither, until another round is not worth it."""

    time_used: TimeUsed | None = None
    steps: int | None = None
    stopped: Callable[[], bool] = lambda: False
    """Whether to end now."""

    @property
    def limited(self) -> bool:
        return self.time_used is not None or self.steps is not None

    def late(self) -> bool:
        """Whether time is up."""
        return self.stopped() or (self.time_used is not None and self.time_used() >= 1)

    def over(self, spent: int) -> bool:
        """Whether nothing is left after ``spent`` evaluations."""
        return self.late() or (self.steps is not None and spent >= self.steps)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the walks: from the fraction ``since`` of their budget to ``until``, with this first heat."""

    since: float
    until: float
    heat: float

    def used(self, budget: Budget, walking: float, steps: float, reached: Callable[[], bool]) -> Callable[[int], float]:
        """A function that tells, after a number of steps, which fraction of this part is used up: all of it once ``reached``.

        The walks have the fraction ``walking`` of the budget, and at most ``steps``.
        """
        most = steps if budget.steps is None else min(steps, walking * budget.steps)

        def used(taken: int) -> float:
            if budget.stopped() or reached():
                return 1.0
            by_steps = taken / max((self.until - self.since) * most, 1)
            if budget.time_used is None:
                return by_steps
            return max(by_steps, (budget.time_used() / walking - self.since) / (self.until - self.since))

        return used


def search(
    evaluator: Evaluator,
    shape: Shape,
    starts: Sequence[Start],
    fetching: Fetching | None,
    bound: RisingBound,
    rng: Random,
    budget: Budget,
    threads: int = 1,
) -> Candidate:
    """The best candidate found within the budget, or at least a seed when time is already up.

    ``starts`` are tried before the seeds made from the links; ``fetching`` prices the transfer of state. The search ends when a
    plan is as good as ``bound``. On a small cluster, what is left of the budget goes to an exact search.
    """
    problem = evaluator.problem
    rules = _rules(problem, shape, fetching)
    small = is_small(problem)
    walking = WALKING_SMALL if small else WALKING
    seeds = _seeds(evaluator, shape, starts, budget)
    best = min(seeds, key=lambda candidate: candidate.price)
    found: list[Found] = []
    # Walks of a small cluster end soon: the exact search finds what they miss.
    longest: float = FIRST_ROUND + STEPS_PER_NODE * len(problem.flops) if small or not budget.limited else math.inf
    while not budget.over(evaluator.spent) and not bound.reached(best.price[-1]):
        before = found[0].price if found else math.inf
        for part in (Part(0.0, 1 - FINAL, WARM if starts else HOT), Part(1 - FINAL, 1.0, WARM)):
            population = _population(problem, shape, seeds, starts, found if part.since else (), rng)
            used = part.used(budget, walking, longest, lambda: bound.reached(evaluator.told))
            made, taken = anneal(evaluator.tables, rules, population, rng, used, evaluator.met, part.heat, threads)
            evaluator.spent += taken
            found = _distinct(sorted({*found, *made}, key=lambda one: (one.price, one.groups)))
        if budget.limited or small or found[0].price > before * (1 - WORTH):
            break
        longest *= 2
    candidates = [evaluator.simulated(best.draft.groups, best.draft.cuts)]
    for one in found:
        if candidates[0].feasible and budget.late():
            break
        candidates.append(evaluator.simulated(one.groups, one.cuts))
    candidates.sort(key=lambda candidate: candidate.price)
    settled = [_settle_cuts(evaluator, candidate, budget) for candidate in candidates[:SETTLED] if candidate.feasible]
    best = min([candidates[0], *settled], key=lambda candidate: candidate.price)
    if best.feasible and not small:
        best = _polished(evaluator, rules, best, rng, budget)
    if small:
        return improve(evaluator, shape, best, budget.steps or evaluator.spent + EXACT_BUDGET, lambda: budget.over(0))
    return best


def _rules(problem: Problem, shape: Shape, fetching: Fetching | None) -> Rules:
    nodes, layers = len(problem.flops), len(problem.activation)
    return Rules(
        nearest=nearest_nodes(problem),
        most_stages=shape.most_stages,
        free_stages=shape.stages is None and shape.sizes is None,
        free_sizes=shape.sizes is None,
        fetching=nothing_to_fetch(nodes, layers) if fetching is None else fetching,
    )


def _seeds(evaluator: Evaluator, shape: Shape, starts: Sequence[Start], budget: Budget) -> list[Candidate]:
    """The starts and the seeds that the shape admits, as far as the budget goes; at least one."""
    near = len(starts[0][0]) if starts else 0
    seeds: list[Start] = [start for start in starts if shape.admits(start[0])]
    seeds += [(groups, None) for groups in seed_groups(evaluator.problem, shape, near) if shape.admits(groups)]
    made: list[Candidate] = []
    for groups, cuts in dict.fromkeys(seeds):
        late = budget.time_used is not None and budget.time_used() > SEEDING
        if (late or budget.over(int(evaluator.spent / SEEDING))) and any(candidate.feasible for candidate in made):
            break
        made.append(evaluator.estimated(groups, cuts))
    return made


def _population(
    problem: Problem,
    shape: Shape,
    seeds: Sequence[Candidate],
    starts: Sequence[Start],
    found: Sequence[Found],
    rng: Random,
) -> list[Position]:
    """Where the walks start: at the best found before, at the best seeds with different numbers of stages, and anywhere.

    With an incumbent, three quarters of them start from the best seeds of all, most of which are the incumbent repaired.
    """
    nodes = len(problem.flops)
    size = max(FEWEST_WALKS, min(MOST_WALKS, WALKS_TIMES_NODES // nodes))
    best_first = sorted(seeds, key=lambda candidate: candidate.price)
    made = [position_of(one.groups, one.cuts, nodes) for one in found[:size]]
    if made:
        return made
    if starts:
        chosen = list(itertools.islice(itertools.cycle(best_first[: max(1, size // 4)]), 3 * size // 4))
    else:
        by_stages: dict[int, Candidate] = {}
        for candidate in best_first:
            by_stages.setdefault(len(candidate.draft.groups), candidate)
        chosen = list(by_stages.values())[: size // 2]
    made += [position_of(candidate.draft.groups, candidate.draft.cuts, nodes) for candidate in chosen]
    while len(made) < size:
        groups = random_groups(nodes, shape, rng)
        made.append(position_of(groups, _even_cuts(len(problem.activation), groups), nodes))
    return made


def _even_cuts(layers: int, groups: Groups) -> tuple[int, ...]:
    return tuple(np.round(np.linspace(0, layers, len(groups) + 1)).astype(int).tolist())


def _settle_cuts(evaluator: Evaluator, best: Candidate, budget: Budget) -> Candidate:
    """Shifts single layers across the cuts while that helps, by simulation."""
    improved = True
    while improved:
        improved = False
        for boundary, by in itertools.product(range(1, len(best.draft.groups)), (-1, 1)):
            if budget.over(evaluator.spent):
                return best
            cuts = list(best.draft.cuts)
            cuts[boundary] += by
            if cuts[boundary - 1] < cuts[boundary] < cuts[boundary + 1]:
                candidate = evaluator.simulated(best.draft.groups, tuple(cuts))
                if candidate.price < best.price:
                    best, improved = candidate, True
    return best


def _polished(evaluator: Evaluator, rules: Rules, best: Candidate, rng: Random, budget: Budget) -> Candidate:
    """Takes short walks from the best plan, and goes on from where they lead if the simulation, too, finds that better."""
    nodes = len(evaluator.problem.flops)
    sketch = empty_sketch(nodes)
    for _ in range(MOST_POLISHES if budget.time_used is not None else POLISHES):
        if budget.over(evaluator.spent):
            break
        here = position_of(best.draft.groups, best.draft.cuts, nodes)
        walk(
            evaluator.tables,
            rules,
            here,
            empty_position(nodes),
            sketch,
            POLISHING_HEAT,
            0.0,
            POLISHING_STEPS,
            rng.getrandbits(32),
            np.full(2, np.inf),
        )
        evaluator.spent += POLISHING_STEPS
        candidate = evaluator.simulated(groups_of(here), cuts_of(here))
        best = min(best, candidate, key=lambda candidate: candidate.price)
    return best


def _distinct(found: list[Found]) -> list[Found]:
    """The best of those with different groups."""
    kept: dict[Groups, Found] = {}
    for one in found:
        kept.setdefault(one.groups, one)
    return list(kept.values())[:FINALISTS]
