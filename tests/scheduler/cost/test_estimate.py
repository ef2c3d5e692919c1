"""The estimate, compiled, against the same formulas in plain Python, and against the simulation."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import spearmanr

from dtfm.scheduler.assemble.evaluate import Candidate, Evaluator, price_of
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.sketch import NO_LINK, draft_of_sketch, empty_sketch, position_of
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.bench.clusters import random_groups, transformer, unequal_cluster
from tests.scheduler.clusters import any_problem, even_workload, random_cluster, uniform_cluster
from tests.scheduler.cost.yardstick_estimate import estimated
from tests.scheduler.plans import iteration_bound, random_draft


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 10),
    layers=st.integers(1, 6),
    keep_idle=st.booleans(),
)
def test_the_estimate_equals_its_formulas(seed: int, count: int, layers: int, keep_idle: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    t = tables(problem)
    sketch = empty_sketch(t)
    for _ in range(4):
        drawn = random_draft(rng, problem)
        position = position_of(drawn.groups, drawn.cuts, count)
        price = price_of(t, position, sketch, keep_idle)
        if price < NO_LINK:
            assert price == pytest.approx(
                estimated(problem, draft_of_sketch(sketch, len(drawn.groups), position.cuts)), rel=1e-9
            )


@pytest.mark.soak
def test_a_large_group_reduces_by_formula_as_the_yardstick_does() -> None:
    cluster = uniform_cluster(54, flops=1e12)
    problem = Problem(replace(cluster, latency=np.full((54, 54), 0.01)), even_workload(4, 108))
    groups, cuts = (tuple(range(5)), tuple(range(5, 54))), (0, 1, 4)
    candidate = Evaluator(problem, keep_idle_hands=False).estimated(groups, cuts)
    assert candidate.seconds == pytest.approx(estimated(problem, candidate.draft), rel=1e-9)


def compared(problem: Problem, rng: Random, most_stages: int, plans: int) -> tuple[float, float]:
    """The rank correlation of estimate and simulation over random groups whose cuts suit them, and the median error."""
    evaluator = Evaluator(problem, keep_idle_hands=False)
    found = list(_feasible(evaluator, rng, most_stages, plans))
    fast = np.array([candidate.seconds for candidate in found])
    exact = np.array([simulate(problem, candidate.draft) for candidate in found])
    assert (exact >= iteration_bound(problem)).all()
    return float(spearmanr(fast, exact)[0]), float(np.median(np.abs(fast - exact) / exact))


def _feasible(evaluator: Evaluator, rng: Random, most_stages: int, plans: int) -> Iterator[Candidate]:
    """The feasible plans among random groups, at most ``plans`` of them."""
    for _ in range(20 * plans):
        groups = random_groups(rng, len(evaluator.problem.flops))
        if len(groups) <= most_stages:
            candidate = evaluator.estimated(groups)
            if candidate.feasible:
                yield candidate
                plans -= 1
        if plans == 0:
            return


def test_the_estimate_ranks_random_plans_as_the_simulation_does() -> None:
    found = []
    for seed in range(6):
        rng = Random(seed)
        layers = tuple(Layer("", 2e11, rng.choice([2e6, 5e7]), rng.choice([1e5, 4e6])) for _ in range(12))
        problem = Problem(random_cluster(seed, rng.choice([4, 8, 16])), Workload(layers, rng.choice([8, 16])))
        found.append(compared(problem, rng, most_stages=8, plans=40))
    ranks, errors = zip(*found, strict=True)
    assert np.mean(ranks) > 0.95
    assert np.median(errors) < 0.05


def test_it_does_so_on_unequal_clusters() -> None:
    found = []
    for seed in range(6):
        problem = Problem(unequal_cluster(seed, 10), transformer(8, 1024, micro_batches=30))
        found.append(compared(problem, Random(seed), most_stages=5, plans=25))
    ranks, errors = zip(*found, strict=True)
    assert np.mean(ranks) > 0.95
    assert np.median(errors) < 0.05
