"""The compiled simulation gives what the one in plain Python gives, in little time, and while other threads run."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.cost.places import seats_passed
from dtfm.scheduler.cost.reduction import EXACT_GROUP, reduction_seconds
from dtfm.scheduler.cost.simulate import simulate, simulated
from dtfm.scheduler.model.chains import places
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import random_cluster
from tests.scheduler.cost.yardstick_simulate import reduction_by_formula, simulated_in_python
from tests.scheduler.drafts import counted, drafts


@given(drafts())
def test_every_draft_takes_as_long_as_in_plain_python(drawn: tuple[Problem, Draft]) -> None:
    problem, draft = drawn
    assert simulate(problem, draft) == pytest.approx(simulated_in_python(problem, draft), rel=1e-9)


@pytest.mark.parametrize("size", [EXACT_GROUP, EXACT_GROUP + 1])
def test_groups_reduce_link_by_link_up_to_a_size_and_by_formula_above(size: int) -> None:
    workload = Workload(tuple(Layer("", 1e11, 1e7, 1e5) for _ in range(3)), micro_batches=size)
    problem = Problem(random_cluster(0, size + 1), workload)
    each = np.ones(size, dtype=np.int64)
    draft = Draft.of(((size,), tuple(range(size))), (0, 1, 3), (np.array([size]), each), (each[None],))
    assert simulate(problem, draft) == pytest.approx(simulated_in_python(problem, draft), rel=1e-9)


@given(drafts())
def test_micro_batches_pass_the_seats_that_plans_say(drawn: tuple[Problem, Draft]) -> None:
    _, draft = drawn
    expected = places(draft.loads[0], draft.flows) + draft.first[:-1]
    assert seats_passed(draft).T.tolist() == expected.tolist()


@given(drafts())
def test_the_formula_for_reductions_is_the_same_in_plain_python(drawn: tuple[Problem, Draft]) -> None:
    problem, draft = drawn
    for group in map(np.array, draft.groups):
        expected = reduction_by_formula(problem, group, 1e6)
        assert reduction_seconds(tables(problem), group, 1e6) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=settings().max_examples // 2)
@given(drafts(most_nodes=2), st.booleans())
def test_all_problems_share_the_compiled_code(drawn: tuple[Problem, Draft], by_column: bool) -> None:
    problem, draft = drawn
    if by_column:
        cluster = problem.cluster
        latency, bandwidth = np.asfortranarray(cluster.latency), np.asfortranarray(cluster.bandwidth)
        problem = Problem(replace(cluster, latency=latency, bandwidth=bandwidth), problem.workload)
    simulate(problem, draft)
    assert len(simulated.signatures) == 1  # type: ignore[attr-defined]


def large(nodes: int, stages: int, micro_batches: int) -> tuple[Problem, Draft]:
    workload = Workload(tuple(Layer("", 2e11, 2e7, 1e5) for _ in range(4 * stages)), micro_batches)
    random = np.random.default_rng(0)
    groups = tuple(tuple(part.tolist()) for part in np.array_split(np.arange(nodes), stages))
    at = [random.integers(0, len(group), micro_batches) for group in groups]
    loads = tuple(np.bincount(place, minlength=len(group)) for place, group in zip(at, groups, strict=True))
    flows = tuple(
        counted(a, b, (len(before), len(after)))
        for (a, b), (before, after) in zip(itertools.pairwise(at), itertools.pairwise(groups), strict=True)
    )
    draft = Draft.of(groups, tuple(range(0, 4 * stages + 1, 4)), loads, flows)
    return Problem(random_cluster(0, nodes), workload), draft


def test_a_large_step_takes_little_time() -> None:
    """2,048 micro-batches through 10 stages of 128 nodes take some 20 ms."""
    problem, draft = large(nodes=128, stages=10, micro_batches=2048)
    simulate(problem, draft)
    began = time.process_time()
    simulate(problem, draft)
    assert time.process_time() - began < 0.1


def test_other_threads_run_meanwhile() -> None:
    problem, draft = large(nodes=2, stages=2, micro_batches=300_000)
    simulate(*large(nodes=2, stages=2, micro_batches=1))
    arrays = tables(problem), draft

    def timed() -> tuple[float, float]:
        began = time.monotonic()
        simulated(*arrays)
        return began, time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        running, moments = pool.submit(timed), []
        while not running.done():
            moments.append(time.monotonic())
        began, ended = running.result()
    middle = [moment for moment in moments if 0.25 < (moment - began) / (ended - began) < 0.75]
    assert len(middle) > 10
