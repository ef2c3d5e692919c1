"""The loads of a stage's replicas."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from dtfm.scheduler.cost.load import balanced_loads


@given(speeds=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), micro_batches=st.integers(0, 7))
def test_no_other_division_lets_the_last_node_finish_earlier(speeds: tuple[int, ...], micro_batches: int) -> None:
    def finish(loads: tuple[int, ...]) -> float:
        return max(load / speed for load, speed in zip(loads, speeds, strict=True))

    loads = balanced_loads(tuple(map(float, speeds)), micro_batches)
    assert sum(loads) == micro_batches
    possible = product(range(micro_batches + 1), repeat=len(speeds))
    assert finish(loads) == min(finish(other) for other in possible if sum(other) == micro_batches)


def test_equally_good_nodes_get_loads_that_differ_by_one_at_most() -> None:
    assert balanced_loads((1.0, 1.0, 1.0), 7) == (3, 2, 2)
