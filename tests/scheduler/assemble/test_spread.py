"""Spreading micro-batches over links, compared with linear programming."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from dtfm.scheduler.assemble.flows import connected
from dtfm.scheduler.assemble.spread import spread
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.workload import Layer, Workload

SECOND = 1e12


def test_the_slowest_link_carries_less() -> None:
    known = np.array([[0, 64], [64, 0]])
    pace = np.array([[1.0, 1.0], [1.0, 10.0]])
    assert spread(pace, pace, known, 0.0).tolist() == [[5, 59], [59, 5]]


def test_links_that_are_busy_for_less_than_devices_are_left_alone() -> None:
    known = np.array([[8, 0], [0, 8]])
    assert spread(np.ones((2, 2)), np.ones((2, 2)), known, free=8.0) is known
    assert spread(np.ones((2, 2)), np.ones((2, 2)), known, free=7.0).tolist() != known.tolist()


def test_links_that_do_not_exist_carry_nothing() -> None:
    known = np.array([[8, 0, 0], [0, 8, 0], [0, 0, 0]])
    pace = np.array([[1.0, 1.0, np.inf], [1.0, np.inf, np.inf], [np.inf, np.inf, np.inf]])
    assert spread(pace, pace, known, 0.0) is known  # the known plan needs a missing link anyway
    pace[1, 1] = 3.0
    with np.errstate(all="raise"):
        assert spread(pace, pace, known, 0.0).tolist() == [[2, 6, 0], [6, 2, 0], [0, 0, 0]]


@st.composite
def transports(draw: st.DrawFn) -> tuple[Floats, Ints]:
    """(pace, counts) of up to 4 x 5 links."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    cells = shape[0] * shape[1]
    pace = draw(st.lists(st.floats(0.01, 10.0), min_size=cells, max_size=cells))
    counts = draw(st.lists(st.integers(0, 40), min_size=cells, max_size=cells).filter(any))
    return np.array(pace).reshape(shape), np.array(counts, dtype=np.int64).reshape(shape)


@given(transports())
def test_sums_are_kept_and_the_busiest_link_is_near_the_optimum(
    transport: tuple[Floats, Ints],
) -> None:
    pace, known = transport
    found = spread(pace, pace, known, 0.0)
    assert (found >= 0).all()
    assert (found.sum(axis=0) == known.sum(axis=0)).all()
    assert (found.sum(axis=1) == known.sum(axis=1)).all()
    longest, best = float((found * pace).max()), _shortest(pace, known)
    before = float((known * pace).max())
    assert longest <= before
    # Whole micro-batches cost up to one on the slowest link in use, and the search stops after a few halvings.
    assert longest <= best + float(pace.max()) + (before - best) / 2**4


def _shortest(pace: Floats, known: Ints) -> float:
    """The least time in which the links carry everything if micro-batches were divisible."""
    rows, columns = pace.shape
    cells = rows * columns
    sums = [[float(cell // columns == row) for cell in range(cells)] + [0.0] for row in range(rows)]
    sums += [[float(cell % columns == column) for cell in range(cells)] + [0.0] for column in range(columns)]
    busy = np.column_stack([np.diag(pace.ravel()), -np.ones(cells)])
    result = linprog(
        [0.0] * cells + [1.0],
        A_ub=busy,
        b_ub=np.zeros(cells),
        A_eq=sums,
        b_eq=[*known.sum(axis=1), *known.sum(axis=0)],
    )
    assert result.success
    return float(result.fun)


def two_stages_of_two(up: float | None) -> tuple[Problem, Groups]:
    """Two layers, 16 micro-batches of 8 bytes that every link carries in a second, and devices that take almost no
    time."""
    cluster = Cluster(
        tuple(Node(f"n{index}", 1e3 * SECOND, 1e9, up=up, down=up) for index in range(4)),
        np.zeros((4, 4)),
        np.full((4, 4), 8.0),
    )
    return Problem(cluster, Workload((Layer("", SECOND, 0.0, 8.0),) * 2, 16)), ((0, 1), (2, 3))


def test_micro_batches_use_all_four_links_when_connections_allow_it() -> None:
    problem, groups = two_stages_of_two(up=1e9)
    (flows,) = connected(problem, groups, (0, 1, 2)).flows
    assert flows.tolist() == [[4, 4], [4, 4]]


def test_used_links_stay_few_when_two_links_carry_no_more_than_one() -> None:
    problem, groups = two_stages_of_two(up=None)
    draft = connected(problem, groups, (0, 1, 2))
    assert np.count_nonzero(draft.flows[0]) == 2
    assert simulate(problem, draft) == pytest.approx(8 + 1, abs=0.2)
