from itertools import pairwise, permutations

import numpy as np
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from dtfm.scheduler.assemble.matching import bottleneck_cost
from dtfm.scheduler.assemble.stage_order import EXACT_STAGES, best_order


def squares(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    return st.integers(1, 6).flatmap(lambda size: arrays(np.float64, (size, size), elements=elements))


few = st.integers(0, 6).map(float)


@given(squares(few | st.just(float("inf"))))
def test_the_cost_is_that_of_the_best_permutation(cost: np.ndarray) -> None:
    rows = np.arange(len(cost))
    assert bottleneck_cost(cost) == min(cost[rows, list(columns)].max() for columns in permutations(range(len(cost))))


def test_large_and_small_matrices_are_matched_alike() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.permutation(100)
    cost = rng.uniform(2.0, 3.0, (100, 100))
    cost[np.arange(100), hidden] = rng.uniform(0.0, 1.0, 100)
    assert bottleneck_cost(cost) == cost[np.arange(100), hidden].max()


@given(squares(few))
def test_the_stage_order_is_the_cheapest_of_all_permutations(cost: np.ndarray) -> None:
    def price(order: tuple[int, ...]) -> float:
        return sum((cost[a, b] for a, b in pairwise(order)), 0.0)

    order = best_order(cost)
    assert sorted(order) == list(range(len(cost)))
    assert price(order) == min(price(other) for other in permutations(range(len(cost))))


def test_stages_too_many_to_order_stay_as_they_are() -> None:
    size = EXACT_STAGES + 1
    assert best_order(np.random.default_rng(0).random((size, size))) == tuple(range(size))
