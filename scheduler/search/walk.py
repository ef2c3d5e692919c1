"""A walk of moves from position to position. It also accepts worse positions, less often the colder it is."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.assemble.cuts import cut_model
from dtfm.scheduler.assemble.equal_groups import paper_price
from dtfm.scheduler.assemble.evaluate import lacking_bytes, price_of_members
from dtfm.scheduler.cost.pace import rough_seconds
from dtfm.scheduler.cost.simulate import simulated
from dtfm.scheduler.cost.state_transfer import fetching_seconds
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.keeping import ENOUGH
from dtfm.scheduler.model.problem import Floats
from dtfm.scheduler.model.sketch import (
    NO_LINK,
    NO_ROOM,
    NOT_PROVEN,
    Position,
    Sketch,
    copy,
    draft_of_sketch,
    gather_members,
    not_proven,
)
from dtfm.scheduler.model.sums import add_up, follow
from dtfm.scheduler.model.tables import Tables
from dtfm.scheduler.search.moves import Rules, change

ROUGH, ESTIMATE, SIMULATION, PAPER = range(4)
"""The sources of a position's seconds: pace.rough_seconds, estimate.estimated_seconds, or simulate.simulated. Each is more
exact than the one before and takes much longer. PAPER is different, the paper's cost model: equal_groups.paper_price."""
ROUGH_DOUBT, ESTIMATE_DOUBT = 1.08, 1.01
"""A more exact price is looked at only if the less exact one is at most this many times the limit."""
NEW_CUTS = 0.02
"""Fraction of the moves that get new cuts; the others keep theirs. A new number of stages always needs new cuts."""
PAPER_HEAT = 0.25
"""The heat of walks by PAPER, as a fraction of others': the levels are most of their price."""
SUMS_LAST = 10_000
"""The number of steps after which sums are added up from the beginning."""


@entry(makes_arrays=True)
def walk(
    t: Tables,
    rules: Rules,
    here: Position,
    best: Position,
    sketch: Sketch,
    exactness: int,
    heat: float,
    evenness: float,
    steps: int,
    seed: int,
    prices: Floats,
) -> None:
    """Takes ``steps`` steps from ``here`` on, in place. The same ``seed`` gives the same steps.

    A step that costs a fraction ``heat`` more is accepted in one case of e. The price of a position is the sum of its seconds,
    the cost of state transfer, and ``evenness`` times the mean seconds of its stages and reductions. Evenness serves plans with
    equally slow slowest resources: walks go on from plans whose other resources are faster.

    ``exactness`` names the source of the seconds: ROUGH, ESTIMATE or SIMULATION, or PAPER, which knows neither memory nor cuts.
    ``prices`` is float64 [2]: the price of ``here`` (evenness included), and the price of ``best`` (without). Both are updated,
    and ``best`` too when the walk meets a better position.
    """
    np.random.seed(seed)
    current, known, seen = NO_ROOM * 2, np.zeros(3), np.zeros(3)
    by_paper = exactness == PAPER
    if by_paper:
        heat *= PAPER_HEAT
    tried = Position(np.empty_like(here.place), np.empty_like(here.cuts), np.empty_like(here.stages))
    decides = np.full(6, -1)
    for step in range(steps + 1):
        copy(here, tried)
        if step > 0 and not change(rules, tried, decides):
            continue
        sketch.decides[:] = -1
        seen[:] = 0.0
        stages = tried.stages[0]
        if not gather_members(tried, sketch):
            continue
        anew = not by_paper and step > 0 and (stages != here.stages[0] or np.random.random() < NEW_CUTS)
        bare = not_proven(t, sketch, stages) if t.mixed and not by_paper else 0
        if anew and bare > 0:
            continue
        lacking = 0.0 if anew or by_paper else lacking_bytes(t, sketch, stages, tried.cuts)
        if lacking >= ENOUGH:
            limit, price = current, NO_ROOM + lacking
        elif bare > 0:
            limit, price = current, NOT_PROVEN + bare
        else:
            if by_paper:
                pass
            elif step % SUMS_LAST == 0:
                add_up(t, sketch.sums, tried.place, stages)
            else:
                follow(t, sketch.sums, tried.place, stages)
            if anew and not cut_model(t, sketch, stages, tried.cuts):
                continue
            limit = current * (1 - heat * np.log(1.0 - np.random.random()))
            price = _price(t, rules, tried, sketch, exactness, known, seen, limit, evenness)
        if price > limit or (price >= NO_LINK and price > current):
            continue
        copy(tried, here)
        if price < NO_LINK and not by_paper:
            here.place[:] = sketch.sums.place  # nodes without micro-batches are idle
        current = price
        known[:] = seen
        decides[:] = sketch.decides
        without = price - evenness * (sketch.levels[0] + sketch.levels[1])
        if price < NO_LINK and without < prices[1]:
            prices[1] = without
            copy(here, best)
    prices[0] = current


@compiled(makes_arrays=True)
def _price(
    t: Tables,
    rules: Rules,
    position: Position,
    sketch: Sketch,
    exactness: int,
    known: Floats,
    seen: Floats,
    limit: float,
    evenness: float,
) -> float:
    """The price of a position, with state transfer and evenness; more than ``limit`` if it exceeds that.

    The quickest price is looked at first. It errs here about as it erred for the position that the walk comes from. So the next
    price is looked at only if the limit is within reach. ``known`` and ``seen`` are float64 [3], the seconds by exactness: of
    the position before (0: not known), and of this one.
    """
    stages, cuts = position.stages[0], position.cuts
    if exactness == PAPER:
        return float(paper_price(t, position, sketch) + evenness * (sketch.levels[0] + sketch.levels[1]))
    transfer = rules.fetching.weight * fetching_seconds(rules.fetching, position) if rules.fetching.weight > 0 else 0.0
    most = limit - transfer
    out_of_reach = most
    if exactness > ROUGH:
        out_of_reach *= ROUGH_DOUBT * (known[ROUGH] / known[exactness] if known[exactness] > 0 else 1.0)
    seconds = seen[ROUGH] = rough_seconds(t, sketch, stages, cuts, out_of_reach, evenness)
    if seconds == np.inf:
        return NO_LINK + 1
    if seconds > out_of_reach:
        return 2 * limit
    if exactness > ROUGH:
        seconds = price_of_members(t, sketch, stages, cuts, not rules.free_sizes)
        if seconds >= NO_LINK:
            return float(seconds)
        seen[ESTIMATE] = seconds
    if exactness == SIMULATION:
        if known[SIMULATION] > 0 and seconds * known[SIMULATION] / known[ESTIMATE] > ESTIMATE_DOUBT * most:
            return 2 * limit
        seconds = seen[SIMULATION] = simulated(t, draft_of_sketch(sketch, stages, cuts))
    return float(seconds + transfer + evenness * (sketch.levels[0] + sketch.levels[1]))
