"""After every move the position is still a valid one."""

import itertools

import numpy as np
from hypothesis import given, strategies as st

from dtfm.scheduler.assemble.cuts import cut_model
from dtfm.scheduler.cost.state_transfer import nothing_to_fetch
from dtfm.scheduler.model.compiled import entry
from dtfm.scheduler.model.problem import Ints, Problem
from dtfm.scheduler.model.sketch import (
    Position,
    copy,
    cuts_of,
    empty_position,
    empty_sketch,
    gather_members,
    groups_of,
    position_of,
)
from dtfm.scheduler.model.sums import add_up
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.search.moves import Rules, change
from dtfm.scheduler.search.seed_groups import nearest_nodes
from tests.scheduler.clusters import even_workload, uniform_cluster
from tests.scheduler.plans import random_draft

MOVES = 150


@entry(makes_arrays=True)
def begin(seed: int) -> None:
    """Seeds the compiled functions' generator."""
    np.random.seed(seed)


def rules_for(problem: Problem, most_stages: int, free_stages: bool, free_sizes: bool) -> Rules:
    nodes, layers = len(problem.flops), len(problem.activation)
    return Rules(nearest_nodes(problem), most_stages, free_stages, free_sizes, nothing_to_fetch(nodes, layers))


def decides_of(rng: np.random.Generator, position: Position) -> Ints:
    """Random deciding nodes (or nobody), and stages."""
    nodes, stages = len(position.place), int(position.stages[0])
    who, where = rng.integers(-1, nodes, 4), rng.integers(0, stages, 2)
    return np.array([who[0], who[1], where[0], who[2], who[3], where[1]])


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 9),
    layers=st.integers(1, 7),
    fixed=st.sampled_from(["nothing", "stages", "sizes"]),
)
def test_stages_have_nodes_and_layers_and_keep_the_shape_that_is_fixed(
    seed: int, count: int, layers: int, fixed: str
) -> None:
    rng = np.random.default_rng(seed)
    problem = Problem(uniform_cluster(count), even_workload(layers))
    t = tables(problem)
    sketch = empty_sketch(t)
    drawn = random_draft(rng, problem)
    most_stages = int(rng.integers(len(drawn.groups), min(count, layers) + 1))
    rules = rules_for(problem, most_stages, fixed == "nothing", fixed != "sizes")
    here, tried = position_of(drawn.groups, drawn.cuts, count), empty_position(count)
    begin(seed)
    for _ in range(MOVES):
        copy(here, tried)
        if not change(rules, tried, decides_of(rng, here)):
            continue
        groups, stages = groups_of(tried), int(tried.stages[0])
        assert 1 <= stages <= most_stages
        assert all(groups)
        assert ((tried.place >= -1) & (tried.place < stages)).all()
        if fixed != "nothing":
            assert stages == len(drawn.groups)
        if fixed == "sizes":
            assert [len(group) for group in groups] == [len(group) for group in drawn.groups]
        if stages != here.stages[0]:  # then the walk makes new cuts
            assert gather_members(tried, sketch)
            add_up(t, sketch.sums, tried.place, stages)
            assert cut_model(t, sketch, stages, tried.cuts)
        cuts = cuts_of(tried)
        assert (cuts[0], cuts[-1]) == (0, layers)
        assert all(a < b for a, b in itertools.pairwise(cuts))
        copy(tried, here)


def test_every_position_of_a_small_cluster_can_be_reached() -> None:
    """Three nodes and three layers: 25 choices of groups, namely one, two and three stages with 1, 2 and 1 cuts."""
    problem = Problem(uniform_cluster(3), even_workload(3))
    rules = rules_for(problem, 3, free_stages=True, free_sizes=True)
    t, rng = tables(problem), np.random.default_rng(0)
    sketch = empty_sketch(t)
    here, tried, met = position_of(((0,),), (0, 3), 3), empty_position(3), set()
    begin(0)
    for _ in range(5_000):
        copy(here, tried)
        if change(rules, tried, decides_of(rng, here)):
            if tried.stages[0] != here.stages[0]:
                assert gather_members(tried, sketch)
                add_up(t, sketch.sums, tried.place, int(tried.stages[0]))
                assert cut_model(t, sketch, int(tried.stages[0]), tried.cuts)
            copy(tried, here)
            met.add((groups_of(here), cuts_of(here)))
    assert len(met) == 7 + 12 * 2 + 6
