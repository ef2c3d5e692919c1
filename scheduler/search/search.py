"""The search for the nodes of each stage: evolutionary, as in arXiv 2206.01288, section 3.4, by different means.

It keeps a population of layouts that differ from each other. The first generation starts from seeds and random positions, later
ones from children of two parents. When children bring nothing better, a generation starts as the first one did. All walk by
rough prices, then by estimates. Of the population and the new layouts, the best that differ survive. In the end the best walk
by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.bound.branch_and_bound import is_small
from dtfm.scheduler.cost.state_transfer import Fetching, nothing_to_fetch
from dtfm.scheduler.model.problem import Draft, Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import Position, position_of
from dtfm.scheduler.search.anneal import HOT, Found, anneal
from dtfm.scheduler.search.budget import Budget as Budget, Purse, TimeUsed as TimeUsed
from dtfm.scheduler.search.exact import improve
from dtfm.scheduler.search.founders import founders, seeds
from dtfm.scheduler.search.moves import Rules
from dtfm.scheduler.search.population import children, survivors
from dtfm.scheduler.search.seed_groups import Start, nearest_nodes
from dtfm.scheduler.search.walk import ESTIMATE, PAPER, ROUGH, SIMULATION

WALKS_TIMES_NODES = 320
"""Walks of a generation, times nodes: chance decides more on small clusters, patience on large ones."""
FEWEST_WALKS, MOST_WALKS = 12, 20
FIRST_ROUND = 25_000
"""Steps of all walks in a search without a limit, and STEPS_PER_NODE more per node. While a longer search is worth it, it goes
on with twice as many steps."""
STEPS_PER_NODE = 500
WORTH = 0.005
"""The least fraction of the step that one part of such a search must save for another part to follow."""
WARM, LUKEWARM = 0.004, 0.01
"""First heat of walks that start from good plans, and from children."""
BETTER = 0.0005
"""Least gain, as a fraction of the step, after which a generation of children is followed by another one of children."""
FEW, TEPID, COOL = 24, 0.01, 0.002
"""First heat of walks by simulation: COOL for clusters of more nodes than FEW, TEPID for others."""
FOUNDING, GENERATION = 1_500, 300
"""Steps of a walk by rough prices, times nodes: FOUNDING in the first generation, GENERATION in generations of children."""
ROUGH_STEPS = 6
"""The number of these steps for each step by estimate: both kinds together take about a third of the time."""
WINNERS_TIMES_NODES = 160
"""The number of members that go on to walks by simulation, times nodes; at least FEWEST_WINNERS members."""
FEWEST_WINNERS = 2
WALKING_SMALL = 0.25
"""Largest fraction of the budget for the first walks on a small cluster, where the exact search is next."""
SOON_LISTED = 6
"""Number of nodes whose plans are soon listed. For each node above this number the first walks are twice as long: the exact
search is more likely not to end in time."""
EXACT_BUDGET = 4_000
"""Simulations of the exact search without a limit."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How a search divides its budget. The fraction ``exploring`` goes to generations. Of each generation, the fraction
    ``roughly`` goes to walks by rough prices, the rest to walks by estimates. The rest of the budget goes to walks by
    simulation, with this first ``heat``."""

    exploring: float
    roughly: float
    heat: float


MANY_NODES, FEW_NODES = Shares(0.8, 0.75, COOL), Shares(0.5, 0.6, TEPID)
"""MANY_NODES is for more than FEW nodes, FEW_NODES for at most FEW: few nodes are simulated quickly, so walks by simulation may
go far."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search has found."""

    best: Candidate
    bound: float
    """A lower bound on the seconds per step of every plan, as far as the search has shown one; 0: none."""
    population: tuple[tuple[Groups, tuple[int, ...]], ...]
    """The groups and cuts of the best plans that differ from each other, the best first."""


def search(
    evaluator: Evaluator,
    shape: Shape,
    starts: Sequence[Start],
    fetching: Fetching | None,
    rng: Random,
    budget: Budget,
    threads: int = 1,
) -> Outcome:
    """The best candidate found within the budget, or at least a seed when time is already up.

    ``starts`` are tried before the seeds made from the links; ``fetching`` prices the transfer of state. On a small cluster, an
    exact search begins when the first walks end, and also gives the bound. If the exact search ends without having listed all
    plans, walks go on for the rest of the budget. Prices come from the evaluator: a PaperEvaluator gives the paper's.
    """
    rules = _rules(evaluator.problem, shape, fetching)._replace(free_cuts=not evaluator.by_paper)
    evolution = _Evolution(evaluator, shape, starts, rules, rng, budget, threads)
    listing, bound = is_small(evaluator.problem) and not evaluator.by_paper, 0.0
    walking = WALKING_SMALL if listing else 1.0
    nodes = len(evaluator.problem.flops)
    longest: float = FIRST_ROUND + STEPS_PER_NODE * nodes
    if listing:
        longest *= 2.0 ** max(0, nodes - SOON_LISTED)
    elif budget.limited:
        longest = math.inf
    paid = evaluator.spent
    while not budget.over(evaluator.spent):
        before = evolution.best.price[-1]
        evolution.go_on(Purse(budget, walking, longest, paid))
        if listing:
            lasts = budget if budget.limited else replace(budget, steps=evaluator.spent + EXACT_BUDGET)
            best, bound, finished = improve(evaluator, shape, evolution.best, lasts)
            evolution.admit(best)
            if finished or not budget.limited:
                break
            listing, walking, longest, paid = False, 1.0, math.inf, 0
        elif budget.limited or not evolution.best.feasible or evolution.best.price[-1] > before * (1 - WORTH):
            break
        else:
            longest, paid = 2 * longest, evaluator.spent
    return Outcome(evolution.best, bound, evolution.end())


class _Evolution:
    """The population of a search, and the best plan that it has met, by simulation."""

    def __init__(
        self,
        evaluator: Evaluator,
        shape: Shape,
        starts: Sequence[Start],
        rules: Rules,
        rng: Random,
        budget: Budget,
        threads: int,
    ) -> None:
        self._evaluator, self._shape, self._rules, self._rng = evaluator, shape, rules, rng
        self._budget, self._threads, self._warm = budget, threads, bool(starts)
        self._nodes = len(evaluator.problem.flops)
        self._size = max(FEWEST_WALKS, min(MOST_WALKS, WALKS_TIMES_NODES // self._nodes))
        self._seeds = seeds(evaluator, shape, starts, budget)
        self.population: list[Found] = []
        self._stale = False
        """The last generation was of children, and none was better than all before."""
        seed = min(self._seeds, key=lambda candidate: candidate.price).draft
        self.best = evaluator.simulated(seed.groups, seed.cuts)

    def go_on(self, purse: Purse) -> None:
        """Generations, then walks by simulation, as long as the purse lasts."""
        evaluator, shares = self._evaluator, FEW_NODES if self._nodes <= FEW else MANY_NODES
        began, pace = purse.used(evaluator.spent), math.inf  # pace: what a step of all walks, times nodes, uses up
        until = began + shares.exploring * (1 - began)
        while began < until:
            positions, steps, heat = self._begin((until - began) / pace)
            most = steps * self._nodes * len(positions)
            # Generations share the rest of the time evenly.
            lasts = (until - began) / max(1, round((until - began) / (pace * steps)))
            part = purse.part(began + shares.roughly * lasts, evaluator.spent, most)
            met = self._walk(positions, part, ROUGH, heat)
            part = purse.part(began + lasts, evaluator.spent, most / ROUGH_STEPS)
            met = self._walk([self._position(one) for one in met], part, ESTIMATE, WARM)
            self._select(met)
            self._take(self._simulated(met[:1]))
            now = purse.used(evaluator.spent)
            began, pace = now, max(now - began, 1e-9) / steps
        finalists = self._simulated(self.population)
        self._take(finalists)
        winners = finalists[: max(FEWEST_WINNERS, WINNERS_TIMES_NODES // self._nodes)] or [self.best]
        positions = [self._position(winner.draft) for winner in winners]
        met = self._walk(positions, purse.part(1.0, evaluator.spent), SIMULATION, shares.heat)
        self._take(self._simulated(met[:1]))

    def admit(self, best: Candidate) -> None:
        """Takes in the best plan, found elsewhere."""
        self._take([best])
        draft = self.best.draft
        price = self._evaluator.estimated(draft.groups, draft.cuts).price[-1]
        self.population = survivors([*self.population, Found(price, draft.groups, draft.cuts)], self._nodes)

    def end(self) -> tuple[tuple[Groups, tuple[int, ...]], ...]:
        """The best plan, and the members that differ from it."""
        best = self.best.draft
        kept = survivors([Found(0.0, best.groups, best.cuts), *self.population], self._nodes)
        return tuple((one.groups, one.cuts) for one in kept)

    def _begin(self, left: float) -> tuple[list[Position], int, float]:
        """Where the next generation starts, the steps of its walks by rough prices, times nodes, and their first heat.

        Children follow until a generation of them has brought nothing better. Then new founders come, if the steps that are
        ``left`` suffice for them.
        """
        problem, keep_sizes = self._evaluator.problem, self._shape.sizes is not None
        steps = GENERATION if self._warm else FOUNDING
        if not self.population or (self._stale and left >= steps):
            self._stale = False
            positions = founders(problem, self._shape, self._seeds, self._warm, self._size, self._rng)
            return positions, steps, WARM if self._warm else HOT
        born = children(self._evaluator, self.population, self._size, keep_sizes, self._rng)
        self._stale = True
        return [self._position(child.draft) for child in born], GENERATION, LUKEWARM

    def _select(self, met: Sequence[Found]) -> None:
        """Lets the best of a generation and of the population survive."""
        before = self.population[0].price if self.population else math.inf
        self.population = survivors([*self.population, *met], self._nodes)
        if self.population and self.population[0].price < before * (1 - BETTER):
            self._stale = False

    def _walk(
        self, positions: list[Position], used: Callable[[int], float], exactness: int, heat: float
    ) -> list[Found]:
        evaluator = self._evaluator
        exactness = PAPER if evaluator.by_paper else exactness
        told = evaluator.met if exactness in (SIMULATION, PAPER) else _ignored
        found, taken = anneal(
            evaluator.tables, self._rules, positions, self._rng, used, told, exactness, heat, self._threads
        )
        evaluator.spent += taken
        return found

    def _simulated(self, found: Sequence[Found]) -> list[Candidate]:
        """The positions of ``found`` that work, by simulation, the best first: as many as there is time for, but at least one."""
        made: list[Candidate] = []
        for one in found:
            candidate = self._evaluator.simulated(one.groups, one.cuts)
            if candidate.feasible:
                made.append(candidate)
            if made and self._budget.late():
                break
        return sorted(made, key=lambda candidate: candidate.price)

    def _take(self, found: Sequence[Candidate]) -> None:
        self.best = min([self.best, *found], key=lambda candidate: candidate.price)

    def _position(self, one: Found | Draft) -> Position:
        return position_of(one.groups, one.cuts, self._nodes)


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
