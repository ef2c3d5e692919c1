"""Children of two layouts."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.search.crossover import Parent, aligned, crossed, mixed, sized
from tests.scheduler.clusters import any_problem, even_workload, uniform_cluster
from tests.scheduler.plans import random_draft


def parent(groups: tuple[tuple[int, ...], ...], cuts: tuple[int, ...], nodes: int = 8) -> Parent:
    return Parent.of(groups, cuts, nodes)


def drawn(rng: np.random.Generator, problem: Problem) -> Parent:
    draft = random_draft(rng, problem)
    return Parent.of(draft.groups, draft.cuts, len(problem.flops))


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 10), layers=st.integers(1, 8), keep_sizes=st.booleans())
def test_a_child_is_a_layout_and_has_each_nodes_place_from_a_parent(
    seed: int, count: int, layers: int, keep_sizes: bool
) -> None:
    """Also if memory and links are missing: then the child has less of its father."""
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    evaluator = Evaluator(problem, keep_idle_hands=True)
    mother, father = drawn(rng, problem), drawn(rng, problem)
    child = crossed(evaluator, mother, father, keep_sizes, Random(seed))
    groups, cuts = child.draft.groups, child.draft.cuts
    nodes = [node for group in groups for node in group]
    assert len(set(nodes)) == len(nodes)
    assert all(groups)
    assert len(groups) == len(mother.groups)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, layers, len(groups) + 1)
    assert all(a < b for a, b in pairwise(cuts))
    if keep_sizes:
        assert [len(group) for group in groups] == [len(group) for group in mother.groups]
    else:
        place, fathers = Parent.of(groups, cuts, count).place, np.append(aligned(mother, father), -1)[father.place]
        assert ((place == mother.place) | (place == fathers)).all()
    again = crossed(Evaluator(problem, keep_idle_hands=True), mother, father, keep_sizes, Random(seed))
    assert (again.draft.groups, again.draft.cuts, again.price) == (groups, cuts, child.price)
    before = evaluator.estimated(mother.groups, mother.cuts)
    assert child.feasible or (groups, cuts) == (before.draft.groups, before.draft.cuts)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 10), layers=st.integers(1, 8), keep_sizes=st.booleans())
def test_equal_parents_give_themselves(seed: int, count: int, layers: int, keep_sizes: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    mother = drawn(rng, problem)
    child = crossed(Evaluator(problem, keep_idle_hands=True), mother, mother, keep_sizes, Random(seed))
    assert (child.draft.groups, child.draft.cuts) == (mother.groups, mother.cuts)


def test_stages_are_aligned_by_their_nodes_even_in_another_order() -> None:
    mother = parent(((0, 1), (2, 3), (4, 5)), (0, 2, 4, 6))
    father = parent(((4, 5, 6), (0, 1), (2,)), (0, 2, 4, 6))
    assert aligned(mother, father).tolist() == [2, 0, 1]


def test_with_other_numbers_of_stages_layers_count_as_much_and_nobody_is_left_over() -> None:
    """The father's middle stage has nodes of both the mother's stages, and its layers are mostly in her second stage."""
    mother = parent(((0, 1, 2, 3), (4, 5, 6, 7)), (0, 4, 12))
    father = parent(((0, 1), (2, 3, 4, 5), (6, 7)), (0, 3, 8, 12))
    assert aligned(mother, father).tolist() == [0, 1, 1]


def test_a_chosen_stage_is_the_fathers_and_chance_places_nodes_without_a_stage() -> None:
    mother, father = np.array([0, 0, 1, 1, 2, -1, -1]), np.array([0, 1, 1, 2, -1, 0, 2])
    never, always = np.zeros(7, dtype=bool), np.ones(7, dtype=bool)
    # Node 3 has left stage 1, which is the father's now, and his stage 2 is not chosen.
    assert mixed(mother, father, [1], never).tolist() == [0, 1, 1, 1, 2, -1, -1]
    assert mixed(mother, father, [1], always).tolist() == [0, 1, 1, 2, 2, 0, 2]


def test_sizes_are_kept_with_nodes_that_a_parent_has_there_first() -> None:
    mother, father = np.array([0, 0, 1, 1, -1, -1]), np.array([0, -1, 1, 0, -1, 1])
    place = np.array([0, 0, 1, -1, -1, -1])
    assert sized(place, (mother, father), (2, 2), Random(0)).tolist() in ([0, 0, 1, 1, -1, -1], [0, 0, 1, -1, -1, 1])
    full = sized(np.zeros(6, dtype=np.int64), (mother, father), (3, 3), Random(1)).tolist()
    assert (full.count(0), full.count(1)) == (3, 3)


def test_a_child_takes_good_stages_from_both() -> None:
    """Four nodes in two houses. Each parent has one house's stage right."""
    problem = Problem(uniform_cluster(4), even_workload(4))
    mother, father = parent(((0, 1), (2,)), (0, 2, 4), 4), parent(((0,), (2, 3)), (0, 2, 4), 4)
    evaluator = Evaluator(problem, keep_idle_hands=False)
    found = {crossed(evaluator, mother, father, False, Random(seed)).draft.groups for seed in range(20)}
    assert ((0, 1), (2, 3)) in found
