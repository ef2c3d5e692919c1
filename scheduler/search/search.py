"""The search over which nodes hold which stage (arXiv 2206.01288, section 3.4, with other means)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.bound.branch_and_bound import is_small
from dtfm.scheduler.cost.state_transfer import Fetching, nothing_to_fetch
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import Position, position_of
from dtfm.scheduler.search.anneal import HOT, Found, anneal
from dtfm.scheduler.search.exact import improve
from dtfm.scheduler.search.moves import Rules
from dtfm.scheduler.search.seeds import Start, nearest_nodes, random_groups, seed_groups
from dtfm.scheduler.search.walk import ESTIMATE, PAPER, ROUGH, SIMULATION

TimeUsed = Callable[[], float]
"""Returns the fraction of the time that is used up; the search ends at 1."""

WALKS_TIMES_NODES = 320
"""Walks of a round, times nodes: chance decides more on small clusters, patience on large ones."""
FEWEST_WALKS, MOST_WALKS = 12, 20
SEEDING = 0.1
"""Largest fraction of the budget for seeds, if one of them works."""
WALKING_SMALL = 0.25
"""Fraction of the budget for walks on a small cluster, where the exact search gets the rest."""
FIRST_ROUND = 25_000
"""Steps of all walks in a search without a limit, and STEPS_PER_NODE more per node. While more is worth it, it is repeated with
twice as many."""
STEPS_PER_NODE = 500
WORTH = 0.005
"""Least fraction of the step that a round must save for another to follow."""
WARM = 0.004
"""First heat of walks that start from good plans."""
FEW, TEPID, COOL = 24, 0.01, 0.002
"""First heat of walks by simulation, with so FEW nodes, and with more."""
ROUND = 1_500
"""Steps of a walk by rough prices, times nodes, in the first round of a search."""
ROUGH_STEPS = 6
"""Of these, the number for each by estimate: together they take about a third of the time."""
FINALISTS = 12
"""Number of positions that are simulated after the walks by estimate."""
WINNERS_TIMES_NODES = 160
"""Number of them from which walks go on by simulation, times nodes; at least FEWEST_WINNERS."""
FEWEST_WINNERS = 2
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
class Shares:
    """How a search divides its budget: the fraction ``exploring`` goes to rounds of walks from new starts, of each round the
    fraction ``roughly`` to walks by rough prices, the rest to walks by estimates. What is left goes to walks by simulation,
    with this first ``heat``, from the best that all rounds have found."""

    exploring: float
    roughly: float
    heat: float


MANY_NODES, FEW_NODES = Shares(0.8, 0.75, COOL), Shares(0.5, 0.6, TEPID)
"""For more than FEW nodes, and for at most FEW: these are simulated quickly, so walks by simulation may go far."""


@dataclass(frozen=True, slots=True)
class Purse:
    """What walks may use up of a budget: the fraction ``walking`` of it, and at most ``steps`` from ``paid`` on."""

    budget: Budget
    walking: float
    steps: float
    paid: int

    def used(self, spent: int) -> float:
        """The fraction that is used up when ``spent`` steps were made in all."""
        if self.budget.stopped():
            return 1.0
        most = self.steps if self.budget.steps is None else min(self.steps, self.walking * self.budget.steps)
        by_steps = (spent - self.paid) / max(most, 1)
        return by_steps if self.budget.time_used is None else max(by_steps, self.budget.time_used() / self.walking)

    def part(self, until: float, spent: int, most: float = math.inf) -> Callable[[int], float]:
        """A function that tells, after a number of further steps, which fraction of a part is used up.

        The part begins now. It ends when the fraction ``until`` of the whole is used up, or after ``most`` steps.
        """
        since = self.used(spent)

        def used(taken: int) -> float:
            now = self.used(spent + taken)
            return 1.0 if now >= 1 else max(taken / most, (now - since) / max(until - since, 1e-9))

        return used


def search(
    evaluator: Evaluator,
    shape: Shape,
    starts: Sequence[Start],
    fetching: Fetching | None,
    rng: Random,
    budget: Budget,
    threads: int = 1,
) -> tuple[Candidate, float]:
    """The best candidate found within the budget, or at least a seed when time is already up. With it the seconds per step than
    which no plan takes less, as far as the search has shown that; 0: not at all.

    ``starts`` are tried before the seeds made from the links; ``fetching`` prices the transfer of state. On a small cluster, what
    is left of the budget goes to an exact search, which shows it.
    """
    problem, nodes = evaluator.problem, len(evaluator.problem.flops)
    winners = max(FEWEST_WINNERS, WINNERS_TIMES_NODES // nodes)
    rules = _rules(problem, shape, fetching)._replace(free_cuts=not evaluator.by_paper)
    shares = FEW_NODES if nodes <= FEW else MANY_NODES
    small = is_small(problem) and not evaluator.by_paper

    def walks(population: list[Position], used: Callable[[int], float], exactness: int, heat: float) -> list[Found]:
        exactness = PAPER if evaluator.by_paper else exactness
        told = evaluator.met if exactness in (SIMULATION, PAPER) else _ignored
        found, taken = anneal(evaluator.tables, rules, population, rng, used, told, exactness, heat, threads)
        evaluator.spent += taken
        return found

    # Walks of a small cluster end soon: the exact search finds what they miss.
    walking = WALKING_SMALL if small else 1.0
    seeds = _seeds(evaluator, shape, starts, budget)
    best = min(seeds, key=lambda candidate: candidate.price)
    best = evaluator.simulated(best.draft.groups, best.draft.cuts)
    longest: float = FIRST_ROUND + STEPS_PER_NODE * nodes if small or not budget.limited else math.inf
    while not budget.over(evaluator.spent):
        before = best.price[-1]
        purse = Purse(budget, walking, longest, evaluator.spent)
        found: list[Found] = []
        began, lasts = 0.0, shares.exploring
        while began < shares.exploring:
            population = _population(problem, shape, seeds, starts, rng)
            most = ROUND * nodes * len(population) if not found else math.inf
            rough = purse.part(began + shares.roughly * lasts, evaluator.spent, most)
            met = walks(population, rough, ROUGH, WARM if starts else HOT)
            population = [position_of(one.groups, one.cuts, nodes) for one in met]
            met = walks(population, purse.part(began + lasts, evaluator.spent, most / ROUGH_STEPS), ESTIMATE, WARM)
            found = sorted([*found, *met], key=lambda one: one.price)
            best = min([best, *_simulated(evaluator, met[:1], budget)], key=lambda candidate: candidate.price)
            # The first round is as long as it need be. The others share evenly what is left.
            now = purse.used(evaluator.spent)
            left = shares.exploring - now
            began, lasts = now, left / max(1, round(left / max(now - began, 1e-9)))
        finalists = _simulated(evaluator, _distinct(found), budget)
        best = min([best, *finalists], key=lambda candidate: candidate.price)
        population = [_position(problem, one) for one in finalists[:winners]] or [_position(problem, best)]
        met = walks(population, purse.part(1.0, evaluator.spent), SIMULATION, shares.heat)
        best = min([best, *_simulated(evaluator, met[:1], budget)], key=lambda candidate: candidate.price)
        if budget.limited or small or not best.feasible or best.price[-1] > before * (1 - WORTH):
            break
        longest *= 2
    if small:
        return improve(evaluator, shape, best, budget.steps or evaluator.spent + EXACT_BUDGET, lambda: budget.over(0))
    return best, 0.0


def _ignored(steps: int, seconds: float) -> None:
    """Only simulated seconds are told."""


def _rules(problem: Problem, shape: Shape, fetching: Fetching | None) -> Rules:
    nodes, layers = len(problem.flops), len(problem.activation)
    return Rules(
        nearest=nearest_nodes(problem),
        most_stages=shape.most_stages,
        free_stages=shape.stages is None and shape.sizes is None,
        free_sizes=shape.sizes is None,
        fetching=nothing_to_fetch(nodes, layers) if fetching is None else fetching,
        equal_sizes=shape.sizes is not None and len(set(shape.sizes)) == 1,
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
    rng: Random,
) -> list[Position]:
    """Where the walks start: at the best seeds with different numbers of stages, and anywhere.

    With an incumbent, three quarters of them start from the best seeds of all, most of which are the incumbent repaired.
    """
    nodes = len(problem.flops)
    size = max(FEWEST_WALKS, min(MOST_WALKS, WALKS_TIMES_NODES // nodes))
    best_first = sorted(seeds, key=lambda candidate: candidate.price)
    if starts:
        chosen = list(itertools.islice(itertools.cycle(best_first[: max(1, size // 4)]), 3 * size // 4))
    else:
        by_stages: dict[int, Candidate] = {}
        for candidate in best_first:
            by_stages.setdefault(len(candidate.draft.groups), candidate)
        chosen = list(by_stages.values())[: size // 2]
    made = [position_of(candidate.draft.groups, candidate.draft.cuts, nodes) for candidate in chosen]
    while len(made) < size:
        groups = random_groups(nodes, shape, rng)
        made.append(position_of(groups, _even_cuts(len(problem.activation), groups), nodes))
    return made


def _even_cuts(layers: int, groups: Groups) -> tuple[int, ...]:
    return tuple(np.round(np.linspace(0, layers, len(groups) + 1)).astype(int).tolist())


def _simulated(evaluator: Evaluator, found: Sequence[Found], budget: Budget) -> list[Candidate]:
    """Those of ``found`` that work, by simulation, the best first: as many as there is time for, but at least one."""
    made: list[Candidate] = []
    for one in found:
        candidate = evaluator.simulated(one.groups, one.cuts)
        if candidate.feasible:
            made.append(candidate)
        if made and budget.late():
            break
    return sorted(made, key=lambda candidate: candidate.price)


def _position(problem: Problem, candidate: Candidate) -> Position:
    return position_of(candidate.draft.groups, candidate.draft.cuts, len(problem.flops))


def _distinct(found: Sequence[Found]) -> list[Found]:
    """The best of those with different groups."""
    kept: dict[Groups, Found] = {}
    for one in found:
        kept.setdefault(one.groups, one)
    return list(kept.values())[:FINALISTS]
