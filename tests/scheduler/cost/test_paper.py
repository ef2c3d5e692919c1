"""The paper's cost model, compiled, against the formulas as the paper has them, and matchings against all permutations."""

from itertools import pairwise, permutations

import numpy as np
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from dtfm.scheduler.assemble.equal_groups import ordered, paper_price
from dtfm.scheduler.assemble.stage_order import EXACT_STAGES, best_order
from dtfm.scheduler.cost.paper import mean_of_pairs, paper_seconds, slowest_pair
from dtfm.scheduler.model.problem import Floats, Groups, Problem
from dtfm.scheduler.model.sketch import empty_sketch, gather_members, position_of
from dtfm.scheduler.model.tables import tables
from tests.scheduler.equal_groups import SHAPES, literal_seconds, lumpy_cluster, paper_job


def squares(most: int) -> st.SearchStrategy[Floats]:
    few = st.integers(0, 6).map(float)
    return st.integers(1, most).flatmap(lambda size: arrays(np.float64, (size, size), elements=few))


@given(squares(6))
def test_matchings_are_the_best_of_all_permutations(cost: Floats) -> None:
    size = len(cost)
    everybody = np.zeros((2 * size, 2 * size))
    everybody[:size, size:] = cost
    before, after = np.arange(size), np.arange(size, 2 * size)
    pairs = [cost[np.arange(size), list(order)] for order in permutations(range(size))]
    sender, receiver, seconds = slowest_pair(everybody, before, after)
    assert seconds == min(pair.max() for pair in pairs)
    assert everybody[sender, receiver] == seconds
    assert np.isclose(mean_of_pairs(everybody, before, after), min(pair.mean() for pair in pairs))


def test_a_hidden_matching_among_a_hundred_is_found() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.permutation(100)
    cost = np.zeros((200, 200))
    cost[:100, 100:] = rng.uniform(2.0, 3.0, (100, 100))
    cost[np.arange(100), 100 + hidden] = rng.uniform(0.0, 1.0, 100)
    before, after = np.arange(100), np.arange(100, 200)
    assert slowest_pair(cost, before, after)[2] == cost[np.arange(100), 100 + hidden].max()
    assert np.isclose(mean_of_pairs(cost, before, after), cost[np.arange(100), 100 + hidden].mean())


@given(squares(6))
def test_the_order_of_stages_is_the_cheapest_of_all(cost: Floats) -> None:
    def price(order: tuple[int, ...]) -> float:
        return sum((cost[a, b] for a, b in pairwise(order)), 0.0)

    order = best_order(cost)
    assert sorted(order) == list(range(len(cost)))
    assert price(order) == min(price(other) for other in permutations(range(len(cost))))


def test_stages_too_many_to_order_stay_as_they_are() -> None:
    size = EXACT_STAGES + 1
    assert best_order(np.random.default_rng(0).random((size, size))) == tuple(range(size))


@given(seed=st.integers(0, 9999), shape=SHAPES, regions=st.integers(1, 6))
def test_a_walks_prices_are_the_formulas_of_the_paper(seed: int, shape: tuple[int, int], regions: int) -> None:
    """Prices one position after another; the sketch remembers them. One node more than take part is idle."""
    stages, replicas = shape
    cluster, workload = lumpy_cluster(seed, stages * replicas + 1, regions), paper_job(stages, replicas)
    problem = Problem(cluster, workload)
    t, rng = tables(problem), np.random.default_rng(seed)
    sketch = empty_sketch(t)
    order = rng.permutation(stages * replicas + 1).tolist()
    for _ in range(6):
        one, other = rng.integers(0, len(order), 2)
        order[one], order[other] = order[other], order[one]
        groups: Groups = tuple(tuple(sorted(order[s * replicas : (s + 1) * replicas])) for s in range(stages))
        position = position_of(groups, tuple(range(stages + 1)), len(order))
        assert gather_members(position, sketch)
        price = paper_price(t, position, sketch)
        assert workload.paper is not None
        data_parallel, pipeline = literal_seconds(cluster, workload.paper, groups)
        assert np.isclose(price, data_parallel + pipeline, rtol=1e-9)
        found = paper_seconds(problem.paper_exchanges(), groups)
        assert np.allclose((found.data_parallel, found.pipeline), (data_parallel, pipeline), rtol=1e-9)
        cheapest = min(sum(literal_seconds(cluster, workload.paper, each)) for each in permutations(groups))
        assert np.isclose(paper_seconds(t.paper, ordered(t.paper[1], groups)).total, cheapest, rtol=1e-9)
