"""Annealing: walks from many starts that cool down together (Kirkpatrick et al. 1983). The best sometimes replace the worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import numpy as np

from dtfm.scheduler.model.problem import Floats, Groups
from dtfm.scheduler.model.sketch import Position, Sketch, copy, cuts_of, empty_sketch, groups_of
from dtfm.scheduler.model.tables import Tables
from dtfm.scheduler.search.moves import Rules
from dtfm.scheduler.search.walk import ESTIMATE, SIMULATION, walk

HOT, COLD = 0.02, 0.0007
"""First and last heat of the walks, as a fraction of the price."""
EVENNESS = 0.6
"""Weight of the stages' mean seconds, beside the slowest stage's seconds, at first; it falls to 0."""
SWEEPS = 60
"""The number of times that the walks get colder."""
SELECTION = 10
"""After every SELECTION sweeps the worst walks, a fraction REPLACED of all, go on from the positions of the best ones."""
REPLACED = 0.25
LEAST_STEPS = 20
"""Least number of steps of a walk before it gets colder."""


@dataclass(slots=True)
class Walker:
    """One walk: its position, the best position that it met, and their prices (with evenness, and without)."""

    here: Position
    best: Position
    sketch: Sketch
    prices: Floats = field(default_factory=lambda: np.full(2, np.inf))


@dataclass(frozen=True, slots=True)
class Found:
    """A position that a walk met, with its price."""

    price: float
    groups: Groups
    cuts: tuple[int, ...]


def anneal(
    t: Tables,
    rules: Rules,
    starts: Sequence[Position],
    rng: Random,
    used: Callable[[int], float],
    met: Callable[[int, float], None],
    exactness: int = ESTIMATE,
    heat: float = HOT,
    threads: int = 1,
) -> tuple[list[Found], int]:
    """Walks from every start until the budget is used up. Returns the best position of each walk, the best first, and the
    steps.

    ``used`` tells, after a number of steps, which fraction of the budget is used up; the heat follows from it. ``met`` is
    called again and again with the steps so far and the least price. ``exactness``: see walk.walk. ``threads`` is the number of
    walks at the same time; it does not change their results.
    """
    walkers = [
        Walker(Position(*map(np.copy, start)), Position(*map(np.copy, start)), empty_sketch(t)) for start in starts
    ]
    steps, taken, spent, before, sweep = LEAST_STEPS, 0, 0.0, used(0), 0
    with ThreadPoolExecutor(threads) as pool:
        while spent < 1:
            now = heat * (COLD / heat) ** min(1.0, spent)
            seeds = [rng.getrandbits(32) for _ in walkers]

            def go(pair: tuple[Walker, int], now: float = now, spent: float = spent, steps: int = steps) -> None:
                walker, seed = pair
                evenness = 0.0 if exactness == SIMULATION else EVENNESS * (1 - min(1.0, spent))
                here, best, sketch, prices = walker.here, walker.best, walker.sketch, walker.prices
                walk(t, rules, here, best, sketch, exactness, now, evenness, steps, seed, prices)

            pairs = list(zip(walkers, seeds, strict=True))
            for _ in pool.map(go, pairs) if threads > 1 else map(go, pairs):
                pass
            sweep += 1
            if sweep % SELECTION == 0:
                _select(walkers)
            taken += steps * len(walkers)
            spent = used(taken)
            met(taken, min(float(walker.prices[1]) for walker in walkers))
            # As many steps as take one of SWEEPS parts of the budget, but not suddenly more.
            share = max(spent - before, 1e-9)
            steps = max(LEAST_STEPS, int(steps * min(2.0, (1 / SWEEPS) / share)))
            before = spent
    found = [Found(float(walker.prices[1]), groups_of(walker.best), cuts_of(walker.best)) for walker in walkers]
    return sorted(found, key=lambda one: (one.price, one.groups)), taken


def _select(walkers: list[Walker]) -> None:
    """Lets the best walks go on in place of the worst. The best positions of the worst walks are kept."""
    order = sorted(walkers, key=lambda walker: float(walker.prices[0]))
    number = int(REPLACED * len(walkers))
    for good, bad in zip(order[:number], reversed(order[len(order) - number :]), strict=True):
        copy(good.here, bad.here)
        bad.prices[0] = good.prices[0]
