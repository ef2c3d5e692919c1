"""Who sends how many micro-batches to whom."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from dtfm.scheduler.assemble.evaluate import price_of
from dtfm.scheduler.assemble.flows import BUSIER, connect
from dtfm.scheduler.cost.load import share_out
from dtfm.scheduler.cost.pace import rough_seconds
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Draft, Floats, Groups, Ints, Problem
from dtfm.scheduler.model.sketch import (
    NO_LINK,
    draft_of_sketch,
    drop_idle,
    empty_sketch,
    gather_members,
    position_of,
)
from dtfm.scheduler.model.sums import add_up
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.clusters import any_problem
from tests.scheduler.plans import assembled, random_draft

SECOND = 1e12


def connected(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> tuple[Draft, int, float]:
    """The plan without its idle nodes, the number of links that it lacks, and the seconds that its busiest node is busy."""
    t, sketch = tables(problem), empty_sketch(len(problem.flops))
    position = position_of(groups, cuts, len(problem.flops))
    gather_members(position, sketch)
    add_up(t, sketch.sums, position.place, len(groups))
    longest = rough_seconds(t, sketch, len(groups), position.cuts, np.inf, 0.0)
    if longest < np.inf:
        longest = share_out(t, sketch, len(groups))
    drop_idle(t, sketch, len(groups))
    missing = connect(t, sketch, len(groups), position.cuts, longest)
    return draft_of_sketch(sketch, cuts), missing, longest


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 10), layers=st.integers(2, 5))
def test_flows_add_up_to_the_loads_on_both_sides(seed: int, count: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    drawn = random_draft(rng, problem)
    draft, missing, longest = connected(problem, drawn.groups, drawn.cuts)
    if np.isinf(longest):
        return  # a stage without links to the one beside it
    for flows, sent, received in zip(draft.flows, draft.loads, draft.loads[1:], strict=False):
        assert (flows >= 0).all()
        assert flows.sum(axis=1).tolist() == sent.tolist()
        assert flows.sum(axis=0).tolist() == received.tolist()
    absent = [
        np.isinf(problem.slowness[np.ix_(a, b)]) | np.isinf(problem.slowness[np.ix_(b, a)]).T
        for a, b in zip(draft.groups, draft.groups[1:], strict=False)
    ]
    assert missing == sum(int((flows[gone] > 0).sum()) for flows, gone in zip(draft.flows, absent, strict=True))


def two_by_two(bandwidth: list[list[float]], latency: list[list[float]] | None = None, size: float = 8.0) -> Problem:
    """Stages of the nodes 0, 1 and 2, 3; ``bandwidth`` and ``latency`` are those of the four links between them, in bytes per
    second and seconds. Devices take almost no time for the 16 micro-batches of ``size`` bytes."""
    speeds, delays = np.full((4, 4), 1e9), np.zeros((4, 4))
    speeds[:2, 2:], speeds[2:, :2] = np.array(bandwidth), np.array(bandwidth).T
    if latency is not None:
        delays[:2, 2:], delays[2:, :2] = np.array(latency), np.array(latency).T
    nodes = tuple(Node(f"n{i}", 1e3 * SECOND, 1e9, up=1e12, down=1e12) for i in range(4))
    return Problem(Cluster(nodes, delays, speeds), Workload((Layer("", SECOND, 0.0, size),) * 2, 16))


def flows_of(problem: Problem) -> list[list[int]]:
    flows: list[list[int]] = assembled(problem, ((0, 1), (2, 3)), (0, 1, 2)).flows[0].tolist()
    return flows


def test_near_pairs_come_first() -> None:
    near, far = 0.001, 0.2
    assert flows_of(two_by_two([[1e12] * 2] * 2, [[near, far], [far, near]])) == [[8, 0], [0, 8]]
    assert flows_of(two_by_two([[1e12] * 2] * 2, [[far, near], [near, far]])) == [[0, 8], [8, 0]]


def test_all_links_are_used_when_no_two_of_them_carry_everything_in_time() -> None:
    assert flows_of(two_by_two([[8.0, 8.0], [8.0, 8.0]])) == [[4, 4], [4, 4]]


def test_a_slow_link_carries_less_than_a_fast_one() -> None:
    (first, second) = flows_of(two_by_two([[8.0, 8.0], [8.0, 1.0]]))
    assert second[1] <= 2
    assert min(first[0], first[1], second[0]) >= 3


def test_a_link_that_does_not_exist_carries_nothing_if_it_can_be_avoided() -> None:
    (first, second) = flows_of(two_by_two([[8.0, 8.0], [8.0, 0.0]]))
    assert second[1] == 0
    assert min(first[1], second[0]) > 0


def test_a_plan_that_needs_a_link_that_does_not_exist_is_priced_as_one_that_does_not_work() -> None:
    problem = two_by_two([[8.0, 8.0], [8.0, 8.0]])
    bandwidth = problem.cluster.bandwidth.copy()
    bandwidth[0, 2] = bandwidth[3, 0] = 0.0  # node 0 reaches node 3 and is reached by node 2, but nothing comes back
    broken = Problem(Cluster(problem.cluster.nodes, problem.latency, bandwidth), problem.workload)
    position, sketch = position_of(((0, 1), (2, 3)), (0, 1, 2), 4), empty_sketch(4)
    assert price_of(tables(problem), position, sketch, True) < NO_LINK
    assert price_of(tables(broken), position, sketch, True) >= NO_LINK


def test_no_link_is_busy_for_longer_than_the_busiest_node_where_that_is_possible() -> None:
    """Linear programming tells what is possible, but for one whole micro-batch, and for BUSIER where it is not."""
    ratios = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(4, 15))
        problem = any_problem(rng, count, 2)
        order, split = rng.permutation(count).tolist(), int(rng.integers(2, count - 1))
        groups = tuple(sorted(order[:split])), tuple(sorted(order[split:]))
        draft, missing, longest = connected(problem, groups, (0, 1, 2))
        if missing or np.isinf(longest):
            continue
        a, b = draft.groups
        pace = np.maximum(problem.slowness[np.ix_(a, b)], problem.slowness[np.ix_(b, a)].T) * problem.activation[0]
        used = draft.flows[0] > 0
        busiest = float((draft.flows[0] * np.where(used, pace, 0.0)).max())
        possible = max(longest, _least(pace, draft.loads[0], draft.loads[1]))
        ratios.append((busiest - pace[used].max()) / possible)
    assert len(ratios) > 150
    assert np.quantile(ratios, 0.9) <= 1.0 + 1e-9
    assert max(ratios) <= BUSIER


def _least(pace: Floats, sent: Ints, received: Ints) -> float:
    """The least time in which the links carry everything if micro-batches were divisible."""
    rows, columns = pace.shape
    cells = rows * columns
    usable = np.isfinite(pace.ravel())
    sums = [[float(cell // columns == row) for cell in range(cells)] + [0.0] for row in range(rows)]
    sums += [[float(cell % columns == column) for cell in range(cells)] + [0.0] for column in range(columns)]
    scale = pace.ravel()[usable].max()
    busy = np.column_stack([np.diag(np.where(usable, pace.ravel(), 0.0) / scale), -np.ones(cells)])
    bounds = [(0.0, None if one else 0.0) for one in usable] + [(0.0, None)]
    result = linprog([0.0] * cells + [1.0], busy, np.zeros(cells), sums, [*sent, *received], bounds)
    assert result.success
    return float(result.fun * scale)


def test_two_links_at_once_halve_the_time_of_a_step_that_links_decide() -> None:
    one, four = two_by_two([[8.0, 1e-9], [1e-9, 8.0]]), two_by_two([[8.0, 8.0], [8.0, 8.0]])
    slow = simulate(one, assembled(one, ((0, 1), (2, 3)), (0, 1, 2)))
    fast = simulate(four, assembled(four, ((0, 1), (2, 3)), (0, 1, 2)))
    assert fast < 0.7 * slow
