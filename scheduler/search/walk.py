"""A walk of moves from position to position, which also accepts worse ones, less often the colder it is."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.assemble.cuts import cut_model
from dtfm.scheduler.assemble.evaluate import price_of
from dtfm.scheduler.cost.state_transfer import fetching_seconds
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats
from dtfm.scheduler.model.sketch import NO_LINK, Position, Sketch, copy, gather_members
from dtfm.scheduler.model.tables import Tables
from dtfm.scheduler.search.moves import Rules, change

NEW_CUTS = 0.1
"""Fraction of the moves that get new cuts; the others keep theirs. A new number of stages always needs new cuts."""


@compiled
def walk(
    t: Tables,
    rules: Rules,
    here: Position,
    best: Position,
    sketch: Sketch,
    heat: float,
    evenness: float,
    steps: int,
    seed: int,
    prices: Floats,
) -> None:
    """Takes ``steps`` steps from ``here`` on, in place. The same ``seed`` gives the same steps.

    A step that costs a fraction ``heat`` more is accepted in one case of e. Positions are compared by their estimated seconds,
    the cost of state transfer, and ``evenness`` times the mean seconds of their stages: of plans whose slowest resource is the
    same, those whose others are faster lead on. ``prices`` is float64 [2], the price of ``here`` (evenness included) and that of
    ``best`` (without). Both are updated, and ``best`` too when a better position is met.
    """
    np.random.seed(seed)
    keep_idle = not rules.free_sizes
    nodes = len(here.place)
    seconds = price_of(t, here, sketch, keep_idle, np.inf, 0.0)
    current = _whole_price(t, rules, here, sketch, seconds, evenness)
    without = _whole_price(t, rules, here, sketch, seconds, 0.0)
    if without < prices[1]:
        prices[1] = without
        copy(here, best)
    decides = sketch.decides.copy()
    tried = Position(np.empty(nodes, np.int64), np.empty(len(here.cuts), np.int64), np.empty(1, np.int64))
    for _ in range(steps):
        copy(here, tried)
        if not change(rules, tried, decides):
            continue
        anew = tried.stages[0] != here.stages[0] or np.random.random() < NEW_CUTS
        if anew and not (gather_members(tried, sketch) and cut_model(t, sketch, tried.stages[0], tried.cuts)):
            continue
        limit = current * (1 - heat * np.log(1.0 - np.random.random()))
        seconds = price_of(t, tried, sketch, keep_idle, limit, evenness)
        price = _whole_price(t, rules, tried, sketch, seconds, evenness)
        if price > limit or (price >= NO_LINK and price > current):
            continue
        copy(tried, here)
        current = price
        decides[:] = sketch.decides
        without = _whole_price(t, rules, here, sketch, seconds, 0.0)
        if without < prices[1]:
            prices[1] = without
            copy(here, best)
    prices[0] = current


@compiled
def _whole_price(t: Tables, rules: Rules, position: Position, sketch: Sketch, seconds: float, evenness: float) -> float:
    """The price of a position that takes ``seconds``, with state transfer and evenness."""
    if seconds >= NO_LINK:
        return float(seconds)
    price = seconds + evenness * (sketch.levels[0] + sketch.levels[1])
    if rules.fetching.weight > 0:
        price += rules.fetching.weight * fetching_seconds(rules.fetching, position)
    return float(price)
