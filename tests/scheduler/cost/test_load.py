"""The loads of a stage's replicas."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.scheduler.cost.load import balance
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.plans import assembled

PACES = st.lists(st.integers(1, 9) | st.just(np.inf), min_size=1, max_size=4)


def balanced(paces: list[float], total: int) -> list[int] | None:
    """The loads of nodes with these seconds per micro-batch; None when there is no such node."""
    loads = np.zeros(len(paces), dtype=np.int64)
    return loads.tolist() if balance(np.array(paces, dtype=np.float64), total, loads) else None


def done(loads: tuple[int, ...] | list[int], paces: list[float]) -> float:
    """When the last node is done."""
    return max(load * pace if load else 0.0 for load, pace in zip(loads, paces, strict=True))


@given(paces=PACES, micro_batches=st.integers(0, 7))
def test_loads_add_up_and_no_other_division_lets_the_last_node_finish_earlier(
    paces: list[float], micro_batches: int
) -> None:
    loads = balanced(paces, micro_batches)
    if loads is None:
        assert np.isinf(paces).all()
        return
    assert sum(loads) == micro_batches
    possible = product(range(micro_batches + 1), repeat=len(paces))
    assert done(loads, paces) == min(done(other, paces) for other in possible if sum(other) == micro_batches)


@given(paces=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40), micro_batches=st.integers(1, 10_000))
def test_nobody_would_be_done_sooner_with_one_micro_batch_of_the_last(paces: list[float], micro_batches: int) -> None:
    loads = balanced(paces, micro_batches)
    assert loads is not None
    assert sum(loads) == micro_batches
    sooner = min((load + 1) * pace for load, pace in zip(loads, paces, strict=True))
    assert done(loads, paces) <= sooner * (1 + 1e-9)


def test_equally_good_nodes_get_loads_that_differ_by_one_at_most_the_first_more() -> None:
    assert balanced([1.0, 1.0, 1.0], 7) == [3, 2, 2]


def test_a_node_that_cannot_compute_gets_nothing() -> None:
    assert balanced([np.inf, 2.0, np.inf, 2.0], 6) == [0, 3, 0, 3]
    assert balanced([np.inf, np.inf], 6) is None


def one_then_two(speeds: tuple[float, ...] = (1, 1, 1), slow: float = 1.0, up: float | None = None) -> Problem:
    """Two layers of 1 second, 12 micro-batches of 1 byte. Every link carries a micro-batch in 0.1 s, links between nodes 0 and
    2 ``slow`` times as slowly, and ``up`` limits node 2's connection."""
    nodes = tuple(Node(f"n{i}", speed, 1e9, up=up if i == 2 else 1e9, down=1e9) for i, speed in enumerate(speeds))
    bandwidth = np.full((3, 3), 10.0)
    bandwidth[2, 0] = bandwidth[0, 2] = 10.0 / slow
    return Problem(Cluster(nodes, np.zeros((3, 3)), bandwidth), Workload((Layer("", 1.0, 1.0, 1.0),) * 2, 12))


def loads_of_the_two(problem: Problem) -> list[int]:
    loads: list[int] = assembled(problem, ((0,), (1, 2)), (0, 1, 2)).loads[1].tolist()
    return loads


def test_the_fast_node_behind_a_slow_link_gets_less() -> None:
    assert loads_of_the_two(one_then_two()) == [6, 6]
    assert loads_of_the_two(one_then_two(speeds=(1, 1, 3))) == [3, 9]
    assert loads_of_the_two(one_then_two(speeds=(1, 1, 3), slow=60)) == [8, 4]  # 3 s to compute, 6 s on the link


def test_the_fast_node_behind_a_slow_connection_gets_less() -> None:
    assert loads_of_the_two(one_then_two(speeds=(1, 1, 3), up=1 / 9)) == [9, 3]


def test_a_node_without_links_to_the_stage_beside_it_gets_nothing() -> None:
    problem = one_then_two(slow=np.inf)
    assert loads_of_the_two(problem) == [12, 0]


@pytest.mark.parametrize("side", [0, 1])
def test_a_node_with_links_to_all_nodes_of_the_stage_beside_it_gets_more_than_one_with_a_link_to_one(side: int) -> None:
    """Links that take 6 s per micro-batch, devices 3 s: two links of one node carry as much as it can compute."""
    bandwidth = np.full((4, 4), 1 / 6)
    bandwidth[1, 3] = bandwidth[3, 1] = 1e-9
    nodes = tuple(Node(f"n{i}", 1.0, 1e9, up=1e9, down=1e9) for i in range(4))
    problem = Problem(Cluster(nodes, np.zeros((4, 4)), bandwidth), Workload((Layer("", 1.0, 1.0, 1.0),) * 2, 12))
    assert assembled(problem, ((0, 1), (2, 3)), (0, 1, 2)).loads[side].tolist() == [8, 4]
