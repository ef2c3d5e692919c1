"""The pace of nodes and the rough price."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.assemble.evaluate import price_of
from dtfm.scheduler.cost.pace import WAITING, rough_seconds, with_waiting
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.sketch import (
    NO_LINK,
    Position,
    Sketch,
    draft_of_sketch,
    empty_sketch,
    gather_members,
    position_of,
)
from dtfm.scheduler.model.sums import add_up
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.schedule import schedule
from tests.bench.clusters import unequal
from tests.scheduler.clusters import any_problem
from tests.scheduler.plans import random_draft


def rough(problem: Problem, position: Position, sketch: Sketch, limit: float = np.inf, evenness: float = 0.0) -> float:
    t, stages = tables(problem), int(position.stages[0])
    assert gather_members(position, sketch)
    add_up(t, sketch.sums, position.place, stages)
    return float(rough_seconds(t, sketch, stages, position.cuts, limit, evenness))


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 12),
    layers=st.integers(1, 6),
    part=st.floats(0.1, 2.0),
    evenness=st.sampled_from([0.0, 0.3]),
)
def test_a_rough_price_below_the_limit_does_not_depend_on_it(
    seed: int, count: int, layers: int, part: float, evenness: float
) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    drawn, sketch = random_draft(rng, problem), empty_sketch(tables(problem))
    position = position_of(drawn.groups, drawn.cuts, count)
    whole = rough(problem, position, sketch)
    if np.isinf(whole):
        return
    even = whole + evenness * float(sketch.levels.sum())
    limited = rough(problem, position, sketch, part * whole, evenness)
    assert limited == whole if even <= part * whole else limited > part * whole


def test_waiting_adds_little_where_one_of_both_is_much_longer() -> None:
    assert with_waiting(100.0, 10.0) == pytest.approx(100.0, rel=1e-3)
    assert with_waiting(10.0, 100.0) == pytest.approx(WAITING * 100.0, rel=1e-3)
    assert 1.2 * 100 < with_waiting(100.0, 100.0) < 1.5 * 100


def test_rough_prices_of_good_plans_come_near_to_their_simulated_seconds() -> None:
    """Plans for 16 unequal nodes, and the same plans with two nodes exchanged."""
    ratios = []
    for seed in range(3):
        cluster, workload = unequal(seed, 16)
        problem, rng, sketch = (
            Problem(cluster, workload),
            Random(seed),
            empty_sketch(tables(Problem(cluster, workload))),
        )
        plan = schedule(cluster, workload, seed=seed, evaluations=4_000).plan
        groups = tuple(tuple(cluster.ids.index(node) for node in stage.replicas) for stage in plan.stages)
        cuts = (0, *(stage.layers[1] for stage in plan.stages))
        for _ in range(20):
            position = position_of(groups, cuts, 16)
            one, other = rng.sample(range(16), 2)
            position.place[[one, other]] = position.place[[other, one]]
            if price_of(tables(problem), position, sketch, False) < NO_LINK:
                seconds = simulate(problem, draft_of_sketch(sketch, len(groups), position.cuts))
                ratios.append(rough(problem, position, sketch) / seconds)
    assert len(ratios) > 20
    assert np.median(np.abs(np.array(ratios) - 1)) < 0.12
