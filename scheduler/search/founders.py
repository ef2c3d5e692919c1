"""The first generation: where its walks start."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import numpy as np

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import Position, position_of
from dtfm.scheduler.search.budget import Budget
from dtfm.scheduler.search.seed_groups import Start, random_groups, seed_groups

SEEDING = 0.1
"""Largest fraction of the budget for seeds, if one of them works."""


def seeds(evaluator: Evaluator, shape: Shape, starts: Sequence[Start], budget: Budget) -> list[Candidate]:
    """The starts and the seeds that the shape admits, as far as the budget goes; at least one."""
    near = len(starts[0][0]) if starts else 0
    drawn: list[Start] = [start for start in starts if shape.admits(start[0])]
    drawn += [(groups, None) for groups in seed_groups(evaluator.problem, shape, near) if shape.admits(groups)]
    made: list[Candidate] = []
    for groups, cuts in dict.fromkeys(drawn):
        if budget.past(SEEDING, evaluator.spent) and any(candidate.feasible for candidate in made):
            break
        made.append(evaluator.estimated(groups, cuts))
    return made


def founders(
    problem: Problem, shape: Shape, seeds: Sequence[Candidate], warm: bool, size: int, rng: Random
) -> list[Position]:
    """``size`` positions: the best seeds with different numbers of stages, and random ones.

    ``warm``: some of the seeds are plans that were in use. Then three quarters of the positions are the best seeds of all.
    """
    nodes = len(problem.flops)
    best_first = sorted(seeds, key=lambda candidate: candidate.price)
    if warm:
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
