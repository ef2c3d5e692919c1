"""Sums over the members of each stage that follow nodes as they move."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.model.problem import Ints, Problem
from dtfm.scheduler.model.sums import (
    EXCHANGE,
    LATENCY,
    SPEED,
    Sums,
    add_up,
    empty_sums,
    follow,
)
from dtfm.scheduler.model.tables import FASTEST, Tables, tables
from tests.scheduler.clusters import any_problem

TOWARD: dict[int, Callable[[Problem, int, int], float]] = {
    SPEED: lambda problem, a, b: min(1 / slowness(problem, a, b), 1 / slowness(problem, b, a), FASTEST),
    EXCHANGE: lambda problem, a, b: exchange(problem, a, b),
    LATENCY: lambda problem, a, b: problem.latency[a, b] + problem.latency[b, a],
}


def exchange(problem: Problem, a: int, b: int) -> float:
    """Seconds that two links need for a byte each, as a multiple of the slower link's seconds."""
    there, back = max(slowness(problem, a, b), 1 / FASTEST), max(slowness(problem, b, a), 1 / FASTEST)
    return float((there + back) / max(there, back)) if np.isfinite(max(there, back)) else 0.0


def slowness(problem: Problem, a: int, b: int) -> np.float64:
    """Seconds per byte. Over a relay, at least an even share among the nodes that send over it."""
    if (relay := int(problem.via[a, b])) < 0:
        return problem.slowness[a, b]  # type: ignore[no-any-return]
    up = (*problem.up, *(each.up for each in problem.cluster.lines))
    down = (*problem.down, *(each.down for each in problem.cluster.lines))
    senders = np.count_nonzero((problem.via == relay).any(axis=1))
    return max(problem.slowness[a, b], senders / min(up[relay], down[relay]))  # type: ignore[no-any-return]


def random_place(rng: np.random.Generator, nodes: int) -> tuple[Ints, int]:
    """A stage or none for each node, and the number of stages. Each stage has a node."""
    stages = int(rng.integers(1, nodes + 1))
    place = rng.integers(-1, stages, nodes)
    place[rng.permutation(nodes)[:stages]] = np.arange(stages)
    return place, stages


def moved(rng: np.random.Generator, place: Ints, stages: int) -> Ints:
    """One or two nodes elsewhere, without regard to stages left empty."""
    changed = place.copy()
    changed[rng.integers(0, len(place), 2)] = rng.integers(-1, stages, 2)
    return changed


def assert_sums_of(problem: Problem, t: Tables, sums: Sums, place: Ints, stages: int) -> None:
    assert sums.place.tolist() == place.tolist()
    for stage in range(stages):
        members = np.flatnonzero(place == stage).tolist()
        row = sums.row[stage]
        for node in range(len(place)):
            for kind, of in TOWARD.items():
                expected = sum(of(problem, node, member) for member in members if member != node)
                assert sums.toward[row, kind, node] == pytest.approx(expected, rel=1e-6, abs=1e-2)
        slowest = sums.slowest[row]
        links = [t.slower[a, b] for a in members for b in members if a != b]
        assert slowest["slowness"] == max(links, default=0.0)
        if links:
            assert t.slower[slowest["one"], slowest["other"]] == max(links)
        else:
            assert (slowest["one"], slowest["other"]) == (-1, -1)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12))
def test_updated_sums_equal_the_sums_of_the_position_whatever_came_before(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, 2)
    t, sums = tables(problem), empty_sums(count)
    for _ in range(6):
        place, stages = random_place(rng, count)
        follow(t, sums, place, stages)
        assert_sums_of(problem, t, sums, place, stages)
        place = moved(rng, place, stages)
        follow(t, sums, place, stages)
        assert_sums_of(problem, t, sums, place, stages)
    add_up(t, sums, place, stages)
    assert_sums_of(problem, t, sums, place, stages)


def test_a_stage_keeps_its_row_when_its_number_changes() -> None:
    rng = np.random.default_rng(0)
    t, sums = tables(any_problem(rng, 12, 2)), empty_sums(12)
    follow(t, sums, np.array([0] * 4 + [1] * 4 + [2] * 4), 3)
    rows = sums.row[:3].tolist()
    follow(t, sums, np.array([1] * 4 + [2] * 4 + [0] * 3 + [-1]), 3)
    assert sums.row[:3].tolist() == [rows[2], rows[0], rows[1]]
