"""The search over which nodes hold which stage: an evolutionary search with local search (arXiv 2206.01288, section 3.4)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.model.problem import Groups
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.search.exact import improve, is_small
from dtfm.scheduler.search.mutations import crossover, neighbour, shift_cut
from dtfm.scheduler.search.seeds import Start, random_groups, seed_groups

Deadline = Callable[[], bool]
"""Returns True when time is up."""

Pricing = Callable[[Groups, tuple[int, ...] | None], Candidate]

POPULATION = 16
"""Largest number of candidates that are kept."""
CROWD = 8
"""Largest number of candidates with the same number of stages, so that others have time to improve."""
FEW_CUTS = 20
"""Largest number of possible cuts that are all tried."""
SETTLED = 64
"""Number of candidates whose cuts are shifted between estimate and simulation."""
FINALISTS = 8
"""Number of candidates whose cuts are shifted at the end."""
STEPS_PER_NODE = 16
"""Mutations per walk and node."""
HEAT = 0.05
"""Highest first temperature of a walk, as a fraction of the seconds per step."""
CUT_SHIFTS = 0.25
"""Fraction of a walk's mutations that shift a cut by one layer."""
KEEP_CUTS = 0.5
"""Fraction of the other mutations that keep the cuts, so that gains from shifting them are not lost."""
PATIENCE = 40
"""Walks without a new best after which the search ends."""
RANDOM_STARTS = 0.5
"""Fraction of the walks that start from random groups once a quarter of PATIENCE is used up: populations lose variety."""
SMALL_CLUSTER_BUDGET = 0.3
"""Fraction of the budget that the evolutionary search gets on a small cluster; the exact search gets the rest."""


def search(
    evaluator: Evaluator, shape: Shape, starts: Sequence[Start], rng: Random, evaluations: int, expired: Deadline
) -> Candidate:
    """The best candidate found within the budget, or at least the best of the seeds when time is already up.

    ``starts`` are tried before the seeds made from the links. On a small cluster, what is left of the budget goes to
    an exact search.
    """
    if not is_small(evaluator.problem):
        return _evolutionary_search(evaluator, shape, starts, rng, evaluations, expired)
    best = _evolutionary_search(evaluator, shape, starts, rng, int(SMALL_CLUSTER_BUDGET * evaluations), expired)
    return improve(evaluator, shape, best, evaluations, expired)


def _evolutionary_search(
    evaluator: Evaluator, shape: Shape, starts: Sequence[Start], rng: Random, evaluations: int, expired: Deadline
) -> Candidate:
    """Searches by estimate with two thirds of the budget, then continues from the best of these by simulation.

    Ends early when PATIENCE walks bring nothing better.
    """
    problem = evaluator.problem
    nodes = len(problem.flops)
    near = len(starts[0][0]) if starts else 0
    seeds: list[Start] = [start for start in starts if shape.admits(start[0])]
    seeds += [(groups, None) for groups in seed_groups(problem, shape, near) if shape.admits(groups)]
    rough = evaluations * 2 // 3
    # With starts, most of a small budget is better spent on improving them than on seeds.
    for_seeds = rough // 3 if starts else evaluations
    population: list[Candidate] = []
    for groups, cuts in dict.fromkeys(seeds):
        if population and (expired() or evaluator.spent >= for_seeds):
            break
        population.append(evaluator.estimated(groups, cuts))

    def over(budget: int) -> Deadline:
        return lambda: evaluator.spent >= budget or expired()

    population = _evolve(evaluator.estimated, nodes, shape, population, rng, over(rough))
    best_first = sorted(population, key=lambda candidate: candidate.price)[:SETTLED]
    promising = _fittest([_settle_cuts(evaluator.estimated, candidate, over(rough)) for candidate in best_first])
    population = []
    for candidate in promising:
        if population and expired():
            break
        population.append(evaluator.simulated(candidate.draft.groups, candidate.draft.cuts))
    population = _fittest(population)
    population = _evolve(evaluator.simulated, nodes, shape, population, rng, over(evaluations * 9 // 10))
    finalists = population[:FINALISTS] if not expired() else population[:1]
    settled = [_settle_cuts(evaluator.simulated, finalist, over(evaluations)) for finalist in finalists]
    return min(settled, key=lambda candidate: candidate.price)


def _evolve(
    price: Pricing, nodes: int, shape: Shape, population: list[Candidate], rng: Random, over: Deadline
) -> list[Candidate]:
    """Children of two parents, each improved by a walk of mutations."""
    population = _fittest(population)
    stale = 0
    while stale < PATIENCE and not over():
        best = population[0].price
        mother, father = rng.choice(population), rng.choice(population)
        child: Groups | None = None
        if stale > PATIENCE // 4 and rng.random() < RANDOM_STARTS:
            child = random_groups(nodes, shape, rng)
        elif mother is not father:
            child = crossover(mother.draft.groups, father.draft.groups, shape, rng)
        start = price(child, None) if child is not None else mother
        population = _fittest([*population, _walk(price, nodes, shape, start, rng, over)])
        stale = 0 if population[0].price < best else stale + 1
    return population


def _walk(price: Pricing, nodes: int, shape: Shape, start: Candidate, rng: Random, over: Deadline) -> Candidate:
    """The best candidate met on a cooling walk, which also accepts worse candidates, less often the later."""
    current = best = start
    heat = HEAT * rng.random()
    steps = STEPS_PER_NODE * nodes
    for step in range(steps):
        if over():
            break
        groups, cuts = current.draft.groups, current.draft.cuts
        if len(groups) > 1 and rng.random() < CUT_SHIFTS:
            shifted = shift_cut(cuts, 1 + rng.randrange(len(groups) - 1), rng.choice((-1, 1)))
            candidate = price(groups, shifted) if shifted else current
        else:
            changed = neighbour(groups, nodes, shape, rng)
            same_cuts = changed is not None and len(changed) == len(groups) and rng.random() < KEEP_CUTS
            candidate = price(changed, cuts if same_cuts else None) if changed else current
        temperature = heat * (1 - step / steps) * current.seconds
        loss = candidate.price[-1] - current.price[-1]
        if candidate.price <= current.price or (
            candidate.feasible and temperature > 0 and rng.random() < math.exp(-loss / temperature)
        ):
            current = candidate
        if current.price < best.price:
            best = current
    return best


def _fittest(population: list[Candidate]) -> list[Candidate]:
    """The best candidates, one for each choice of groups and at most CROWD for each number of stages."""
    kept: dict[Groups, Candidate] = {}
    crowd: Counter[int] = Counter()
    for candidate in sorted(population, key=lambda candidate: candidate.price):
        groups = candidate.draft.groups
        if groups not in kept and crowd[len(groups)] < CROWD and len(kept) < POPULATION:
            kept[groups] = candidate
            crowd[len(groups)] += 1
    return list(kept.values())


def _settle_cuts(price: Pricing, best: Candidate, over: Deadline) -> Candidate:
    """The best cuts for the candidate's groups; best_cuts ignores single links and reductions.

    Tries all cuts where they are few. Otherwise shifts single layers across the cuts while that helps.
    """
    if not best.feasible or over():
        return best
    groups, layers = best.draft.groups, best.draft.cuts[-1]
    if math.comb(layers - 1, len(groups) - 1) <= FEW_CUTS:
        every = itertools.combinations(range(1, layers), len(groups) - 1)
        return min([best, *(price(groups, (0, *inner, layers)) for inner in every)], key=lambda found: found.price)
    improved = True
    while improved and not over():
        improved = False
        cuts = best.draft.cuts
        for boundary in range(1, len(cuts) - 1):
            for shift in (-1, 1):
                shifted = shift_cut(cuts, boundary, shift)
                if shifted:
                    candidate = price(best.draft.groups, shifted)
                    if candidate.price < best.price:
                        best, improved = candidate, True
    return best
