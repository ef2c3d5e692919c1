"""The search over who holds which stage: evolutionary with local search (arXiv 2206.01288, section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from dtfm.scheduler.evaluate import Candidate, Evaluator
from dtfm.scheduler.moves import Shape, crossover, neighbour
from dtfm.scheduler.problem import Groups
from dtfm.scheduler.seeds import all_groups, seed_groups

Deadline = Callable[[], bool]
"""Says whether time is up."""

POPULATION = 16
SMALL = 5
"""Up to so many nodes every choice of groups is priced (1,081 for five)."""


def search(
    evaluator: Evaluator, shape: Shape, extra: Iterable[Groups], rng: Random, evaluations: int, expired: Deadline
) -> Candidate:
    """The best candidate found within the budget; the best of the seeds at least, even when time is up already.

    ``extra`` are seeds beside those from the links (the incumbent). Ends early when nothing new was found for long.
    """
    problem = evaluator.problem
    count = len(problem.flops)
    seeds = [groups for groups in (*extra, *seed_groups(problem, shape)) if shape.admits(groups)]
    if count <= SMALL:
        seeds += all_groups(count, shape)
    population: list[Candidate] = []
    for groups in dict.fromkeys(seeds):
        if population and (expired() or evaluator.spent >= evaluations):
            break
        population.append(evaluator(groups))
    population = _fittest(population)
    if count > SMALL:
        population = _evolve(evaluator, shape, population, rng, evaluations, expired)
    return _shift_cuts(evaluator, population[0], expired)


def _evolve(
    evaluator: Evaluator, shape: Shape, population: list[Candidate], rng: Random, evaluations: int, expired: Deadline
) -> list[Candidate]:
    nodes = len(evaluator.problem.flops)
    patience = 8 * nodes
    stale = 0
    while stale < 12 and evaluator.spent < evaluations and not expired():
        best = population[0].price
        mother, father = rng.choice(population), rng.choice(population)
        child = crossover(mother.draft.groups, father.draft.groups, shape, rng) if mother is not father else None
        current = evaluator(child) if child is not None else mother
        failures = tries = 0
        while failures < patience and tries < 20 * patience and evaluator.spent < evaluations and not expired():
            tries += 1
            changed = neighbour(current.draft.groups, nodes, shape, rng)
            if changed is None:
                continue
            candidate = evaluator(changed)
            if candidate.price < current.price:
                current, failures = candidate, 0
            else:
                failures += 1
        population = _fittest([*population, current])
        stale = 0 if population[0].price < best else stale + 1
    return population


def _fittest(population: list[Candidate]) -> list[Candidate]:
    unique = {candidate.draft.groups: candidate for candidate in population}
    return sorted(unique.values(), key=lambda candidate: candidate.price)[:POPULATION]


def _shift_cuts(evaluator: Evaluator, best: Candidate, expired: Deadline) -> Candidate:
    """Moves single layers across the cuts while that helps: transfers and reductions are not in the balance by speed."""
    if not best.feasible:
        return best
    improved = True
    while improved and not expired():
        improved = False
        cuts = best.draft.cuts
        for boundary in range(1, len(cuts) - 1):
            for shift in (-1, 1):
                moved = (*cuts[:boundary], cuts[boundary] + shift, *cuts[boundary + 1 :])
                if moved[boundary - 1] < moved[boundary] < moved[boundary + 1]:
                    candidate = evaluator(best.draft.groups, moved)
                    if candidate.price < best.price:
                        best, improved = candidate, True
    return best
