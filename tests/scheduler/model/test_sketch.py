"""A position, and the sketch that follows from it."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.assemble.evaluate import price_of
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.sketch import (
    NO_LINK,
    copy,
    cuts_of,
    draft_of_sketch,
    drop_idle,
    empty_position,
    empty_sketch,
    gather_members,
    groups_of,
    position_of,
)
from dtfm.scheduler.model.sums import add_up
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import any_problem, even_workload, uniform_cluster
from tests.scheduler.plans import random_draft


@given(seed=st.integers(0, 10**6), count=st.integers(1, 20), layers=st.integers(1, 9))
def test_groups_and_cuts_become_a_position_and_back(seed: int, count: int, layers: int) -> None:
    drawn = random_draft(np.random.default_rng(seed), Problem(uniform_cluster(count), even_workload(layers)))
    position = position_of(drawn.groups, drawn.cuts, count)
    assert groups_of(position) == drawn.groups
    assert cuts_of(position) == drawn.cuts
    used = {node for group in drawn.groups for node in group}
    assert {node for node in range(count) if position.place[node] == -1} == set(range(count)) - used


def test_a_copy_is_equal_and_its_own() -> None:
    source, target = position_of(((1,), (0, 2)), (0, 3, 5), 4), empty_position(4)
    copy(source, target)
    assert (groups_of(target), cuts_of(target)) == (((1,), (0, 2)), (0, 3, 5))
    target.place[3] = 1
    assert groups_of(source) == ((1,), (0, 2))


def test_members_are_gathered_by_stage_in_ascending_order_and_idle_ones_are_dropped() -> None:
    t = tables(any_problem(np.random.default_rng(0), 6, 2))
    sketch = empty_sketch(t)
    position = position_of(((4, 1), (5, 0, 2)), (0, 1, 2), 6)
    assert gather_members(position, sketch)
    add_up(t, sketch.sums, position.place, 2)
    assert sketch.members[:5].tolist() == [1, 4, 0, 2, 5]
    assert sketch.stage["first"][:3].tolist() == [0, 2, 5]
    sketch.node["load"][:6] = [3, 0, 0, 0, 9, 6]
    drop_idle(t, sketch, 2)
    assert sketch.members[:3].tolist() == [4, 0, 5]
    assert sketch.stage["first"][:3].tolist() == [0, 1, 3]
    left, anew = sketch.sums, empty_sketch(t).sums
    add_up(t, anew, np.array([1, -1, -1, -1, 0, 1]), 2)
    assert left.place.tolist() == anew.place.tolist()
    assert left.toward[left.row[:2]] == pytest.approx(anew.toward[anew.row[:2]], rel=1e-6, abs=1e-2)


def test_a_stage_without_members_is_noticed() -> None:
    position = position_of(((0,), (1,)), (0, 1, 2), 3)
    position.place[1] = -1
    assert not gather_members(position, empty_sketch(tables(any_problem(np.random.default_rng(0), 3, 2))))


def test_the_draft_of_a_sketch_names_members_loads_and_flows_by_place() -> None:
    """One node feeds two. The second of these computes twice as fast. The fourth node is too slow to get anything."""
    speeds = (1e13, 1e12, 2e12, 1e9)
    nodes = tuple(Node(f"n{i}", speed, 1e9) for i, speed in enumerate(speeds))
    problem = Problem(
        Cluster(nodes, np.zeros((4, 4)), np.full((4, 4), 1e12)), Workload((Layer("", 1e12, 1.0, 1.0),) * 2, 9)
    )
    sketch = empty_sketch(tables(problem))
    assert price_of(tables(problem), position_of(((0,), (1, 2, 3)), (0, 1, 2), 4), sketch, False) < NO_LINK
    draft = draft_of_sketch(sketch, 2, np.array([0, 1, 2]))
    assert draft.groups == ((0,), (1, 2))
    assert draft.cuts == (0, 1, 2)
    assert [loads.tolist() for loads in draft.loads] == [[9], [3, 6]]
    assert [flows.tolist() for flows in draft.flows] == [[[3, 6]]]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), layers=st.integers(1, 6), keep_idle=st.booleans())
def test_a_sketch_that_is_filled_again_tells_nothing_of_the_position_before(
    seed: int, count: int, layers: int, keep_idle: bool
) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    t = tables(problem)
    used = empty_sketch(t)
    for _ in range(5):
        drawn, fresh = random_draft(rng, problem), empty_sketch(t)
        position = position_of(drawn.groups, drawn.cuts, count)
        prices = [price_of(t, position, sketch, keep_idle) for sketch in (used, fresh)]
        assert prices[0] == prices[1]
        if prices[0] < NO_LINK:
            again, once = (draft_of_sketch(sketch, len(drawn.groups), position.cuts) for sketch in (used, fresh))
            assert all((a == b).all() for a, b in zip(again, once, strict=True))
