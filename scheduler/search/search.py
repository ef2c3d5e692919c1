"""The search over who holds which stage: evolutionary with local search (arXiv 2206.01288, section 3.4)."""

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
"""Says whether time is up."""

Pricing = Callable[[Groups, tuple[int, ...] | None], Candidate]

POPULATION = 16
CROWD = 8
"""Of the population, with one number of stages: others must have time to grow."""
FEW_CUTS = 20
SETTLED = 64
"""Whose cuts are shifted between estimate and simulation."""
FINALISTS = 8
"""Whose cuts are shifted in the end."""
STEPS_PER_NODE = 16
HEAT = 0.05
"""First temperature of a walk at most, as part of the seconds per step."""
CUT_SHIFTS = 0.25
"""Part of a walk's steps that move a cut by a layer."""
KEEP_CUTS = 0.5
"""Part of the other steps that leave the cuts where they are, so that what was gained by moving them is not lost."""
PATIENCE = 40
"""Walks without a new best after which the search ends."""
STRANGERS = 0.5
"""Part of the walks that begin anywhere, once PATIENCE is down by a quarter: a population grows alike."""
SMALL_SHARE = 0.3
"""Part of the budget that the search gets on a small cluster."""


def search(
    evaluator: Evaluator, shape: Shape, starts: Sequence[Start], rng: Random, evaluations: int, expired: Deadline
) -> Candidate:
    """The best candidate found within the budget; the best of the seeds at least, even when time is up already.

    ``starts`` are tried before the seeds from the links. On a small cluster what the search leaves of the budget goes to every
    plan that may be better still.
    """
    if not is_small(evaluator.problem):
        return _found(evaluator, shape, starts, rng, evaluations, expired)
    best = _found(evaluator, shape, starts, rng, int(SMALL_SHARE * evaluations), expired)
    return improve(evaluator, shape, best, evaluations, expired)


def _found(
    evaluator: Evaluator, shape: Shape, starts: Sequence[Start], rng: Random, evaluations: int, expired: Deadline
) -> Candidate:
    """First by estimate, with two thirds of the budget; then the best of these by simulation. Ends early when nothing new was
    found for long."""
    problem = evaluator.problem
    nodes = len(problem.flops)
    near = len(starts[0][0]) if starts else 0
    seeds: list[Start] = [start for start in starts if shape.admits(start[0])]
    seeds += [(groups, None) for groups in seed_groups(problem, shape, near) if shape.admits(groups)]
    rough = evaluations * 2 // 3
    # With something to start from, most of a small budget is better spent on improving it.
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
    """Children of two parents, each improved by a walk of small changes."""
    population = _fittest(population)
    stale = 0
    while stale < PATIENCE and not over():
        best = population[0].price
        mother, father = rng.choice(population), rng.choice(population)
        child: Groups | None = None
        if stale > PATIENCE // 4 and rng.random() < STRANGERS:
            child = random_groups(nodes, shape, rng)
        elif mother is not father:
            child = crossover(mother.draft.groups, father.draft.groups, shape, rng)
        start = price(child, None) if child is not None else mother
        population = _fittest([*population, _walk(price, nodes, shape, start, rng, over)])
        stale = 0 if population[0].price < best else stale + 1
    return population


def _walk(price: Pricing, nodes: int, shape: Shape, start: Candidate, rng: Random, over: Deadline) -> Candidate:
    """The best candidate met on a cooling walk: worse ones are taken, too, the less likely the later."""
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
    """The best, one for each choice of groups, and no more than CROWD for each number of stages."""
    kept: dict[Groups, Candidate] = {}
    crowd: Counter[int] = Counter()
    for candidate in sorted(population, key=lambda candidate: candidate.price):
        groups = candidate.draft.groups
        if groups not in kept and crowd[len(groups)] < CROWD and len(kept) < POPULATION:
            kept[groups] = candidate
            crowd[len(groups)] += 1
    return list(kept.values())


def _settle_cuts(price: Pricing, best: Candidate, over: Deadline) -> Candidate:
    """The best cuts for the groups: best_cuts sees neither single links nor reductions.

    All of them where they are few; else single layers move across the cuts while that helps.
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
                moved = shift_cut(cuts, boundary, shift)
                if moved:
                    candidate = price(best.draft.groups, moved)
                    if candidate.price < best.price:
                        best, improved = candidate, True
    return best
