"""How many micro-batches each node sends to each node of the next stage."""

import numpy as np
from hypothesis import given, strategies as st
from scipy.optimize import linprog

from dtfm.scheduler.assemble.evaluate import price_of
from dtfm.scheduler.assemble.flows import connect
from dtfm.scheduler.cost.load import share_out
from dtfm.scheduler.cost.pace import FREE, rough_seconds
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.problem import Draft, Floats, Groups, Problem
from dtfm.scheduler.model.sketch import (
    NO_LINK,
    Sketch,
    draft_of_sketch,
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


def connected(problem: Problem, groups: Groups, cuts: tuple[int, ...]) -> tuple[Draft, Sketch, float] | None:
    """The plan, its sketch, and the seconds that its nodes would be busy if links demanded nothing. None if links are missing."""
    t = tables(problem)
    sketch = empty_sketch(t)
    position = position_of(groups, cuts, len(problem.flops))
    gather_members(position, sketch)
    add_up(t, sketch.sums, position.place, len(groups))
    if np.isinf(rough_seconds(t, sketch, len(groups), position.cuts, np.inf, 0.0)):
        return None
    longest = share_out(t, sketch, len(groups))
    if not connect(t, sketch, len(groups), position.cuts, longest):
        return None
    return draft_of_sketch(sketch, len(groups), position.cuts), sketch, longest


@given(seed=st.integers(0, 10**6), count=st.integers(2, 10), layers=st.integers(2, 5))
def test_flows_add_up_to_the_loads_on_both_sides(seed: int, count: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    drawn = random_draft(rng, problem)
    made = connected(problem, drawn.groups, drawn.cuts)
    if made is None:
        return
    draft = made[0]
    for loads in draft.loads:
        assert (loads >= 0).all()
        assert loads.sum() == problem.workload.micro_batches
    for flows, sent, received in zip(draft.flows, draft.loads, draft.loads[1:], strict=False):
        assert (flows >= 0).all()
        assert flows.sum(axis=1).tolist() == sent.tolist()
        assert flows.sum(axis=0).tolist() == received.tolist()
    for a, b, flows in zip(draft.groups, draft.groups[1:], draft.flows, strict=False):
        absent = np.isinf(problem.slowness[np.ix_(a, b)]) | np.isinf(problem.slowness[np.ix_(b, a)]).T
        assert not flows[absent].any()


def two_by_two(bandwidth: list[list[float]], latency: list[list[float]] | None = None, size: float = 8.0) -> Problem:
    """Stages of the nodes 0, 1 and 2, 3. ``bandwidth`` and ``latency`` are of the four links between them, in bytes per second
    and seconds. Devices take almost no time for the 16 micro-batches of ``size`` bytes."""
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


def test_nodes_whose_links_lead_nowhere_leave_their_loads_to_others() -> None:
    """Node 0 reaches node 3 and is reached by node 2, but nothing comes back."""
    problem = two_by_two([[8.0, 8.0], [8.0, 8.0]])
    bandwidth = problem.cluster.bandwidth.copy()
    bandwidth[0, 2] = bandwidth[3, 0] = 0.0
    broken = Problem(Cluster(problem.cluster.nodes, problem.latency, bandwidth), problem.workload)
    assert assembled(broken, ((0, 1), (2, 3)), (0, 1, 2)).loads[0].tolist()[-1] == 16


def test_a_plan_whose_stages_have_no_way_through_is_priced_as_one_that_does_not_work() -> None:
    """Each node has links to both sides, but one chain of them has no end and the other no beginning."""
    groups, cuts = ((0,), (1, 2), (3, 4), (5, 6), (7, 8), (9,)), (0, 1, 2, 3, 4, 5, 6)
    speeds = np.zeros((10, 10))
    chains = [(0, 1), (1, 3), (3, 5), (5, 7), (2, 4), (4, 6), (6, 8), (8, 9)]
    reductions = [(1, 2), (3, 4), (5, 6), (7, 8)]
    for a, b in chains + reductions:
        speeds[a, b] = speeds[b, a] = 8.0
    nodes = tuple(Node(f"n{i}", SECOND, 1e9, up=1e12, down=1e12) for i in range(10))
    workload = Workload((Layer("", SECOND, 0.0, 8.0),) * 6, 16)
    broken = Problem(Cluster(nodes, np.zeros((10, 10)), speeds.copy()), workload)
    speeds[7, 9] = speeds[9, 7] = 8.0
    whole = Problem(Cluster(nodes, np.zeros((10, 10)), speeds), workload)
    assert price_of(tables(broken), position_of(groups, cuts, 10), empty_sketch(tables(whole)), False) >= NO_LINK
    assert price_of(tables(whole), position_of(groups, cuts, 10), empty_sketch(tables(whole)), False) < NO_LINK


def test_fewer_micro_batches_than_slow_links_still_find_their_way() -> None:
    """64 links of 2,000 s side by side would carry 16 micro-batches in 500 s, if these could be divided."""
    speeds = np.full((16, 16), 1e9)
    speeds[:8, 8:] = speeds[8:, :8] = 8.0 / 2000
    nodes = tuple(Node(f"n{i}", SECOND, 1e9, up=1e12, down=1e12) for i in range(16))
    problem = Problem(Cluster(nodes, np.zeros((16, 16)), speeds), Workload((Layer("", SECOND, 0.0, 8.0),) * 2, 16))
    made = connected(problem, (tuple(range(8)), tuple(range(8, 16))), (0, 1, 2))
    assert made is not None
    assert made[0].flows[0].max() == 1


def test_nobody_is_busy_for_longer_than_a_maximum_flow_demands() -> None:
    """Linear programming tells how many micro-batches per second pass through all stages; whole ones may take a little longer."""
    ratios = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = any_problem(rng, int(rng.integers(4, 15)), 4)
        drawn = random_draft(rng, problem)
        made = connected(problem, drawn.groups, drawn.cuts)
        if made is None or len(drawn.groups) == 1:
            continue
        draft, sketch, longest = made
        alone = [sketch.node["alone"][list(group)] for group in draft.groups]
        # One micro-batch less than each has, as they cannot be divided.
        busy = [
            float((np.maximum(loads - 1, 0) * paces).max()) for loads, paces in zip(draft.loads, alone, strict=True)
        ]
        links = []
        for a, b, flows, cut in zip(draft.groups, draft.groups[1:], draft.flows, draft.cuts[1:], strict=False):
            links.append(FREE * problem.activation[cut - 1] * tables(problem).slower[np.ix_(a, b)])
            busy.append(float((np.maximum(flows - 1, 0) * np.where(flows, links[-1], 0.0)).max()))
        total = problem.workload.micro_batches
        possible = max(longest, total / maximum_flow([1 / paces for paces in alone], [1 / paces for paces in links]))
        ratios.append(max(busy) / possible)
        slowest = max(float(paces[flows > 0].max()) for paces, flows in zip(links, draft.flows, strict=True))
        if slowest > 1.1 * possible:  # right only if whole micro-batches leave no other way
            nodes = [np.floor(slowest / 1.1 / paces) for paces in alone]
            assert maximum_flow(nodes, [np.floor(slowest / 1.1 / paces) for paces in links]) < total - 1e-6
    assert len(ratios) > 100
    assert np.quantile(ratios, 0.9) <= 1.0 + 1e-9
    assert max(ratios) <= 1.1


def maximum_flow(nodes: list[Floats], links: list[Floats]) -> float:
    """The most that passes through all stages. ``nodes`` [members] and ``links`` [senders, receivers] are what each lets pass."""
    most = np.concatenate([limit.ravel() for limit in links])
    begin = np.cumsum([0, *(limit.size for limit in links)])
    cell = [np.arange(limit.size).reshape(limit.shape) + at for limit, at in zip(links, begin, strict=False)]
    sums, limits, kept = [], [], []
    for stage, members in enumerate(nodes):
        for node, limit in enumerate(members):
            into, out = np.zeros(len(most)), np.zeros(len(most))
            if stage > 0:
                into[cell[stage - 1][:, node]] = 1
            if stage < len(links):
                out[cell[stage][node]] = 1
            sums.append(into if stage > 0 else out)
            limits.append(limit)
            if 0 < stage < len(links):
                kept.append(into - out)
    wanted = np.zeros(len(most))
    wanted[cell[0]] = -1
    scale = max(limits) or 1.0
    result = linprog(
        wanted,
        np.array(sums),
        np.array(limits) / scale,
        np.array(kept) if kept else None,
        np.zeros(len(kept)) if kept else None,
        [(0.0, min(one / scale, 1.0)) for one in most],
    )
    assert result.success
    return float(-result.fun * scale)


def test_a_node_with_fast_links_only_to_a_slow_node_leaves_its_load_to_another() -> None:
    """Of nodes 0 and 1, which are alike, node 0 reaches the slow node 2 quickly, and the fast node 3 slowly."""
    speeds = np.full((4, 4), 1e9)
    speeds[0, 3] = speeds[3, 0] = 2.0
    nodes = tuple(Node(f"n{i}", speed * SECOND, 1e9, up=1e12, down=1e12) for i, speed in enumerate((4, 4, 0.1, 9)))
    workload = Workload((Layer("", SECOND, 0.0, 8.0),) * 2, 32)
    draft = assembled(Problem(Cluster(nodes, np.zeros((4, 4)), speeds), workload), ((0, 1), (2, 3)), (0, 1, 2))
    assert draft.loads[0][0] < draft.loads[0][1] / 2
    assert draft.flows[0][0, 1] <= 8


def test_two_links_at_once_halve_the_time_of_a_step_that_links_decide() -> None:
    one, four = two_by_two([[8.0, 1e-9], [1e-9, 8.0]]), two_by_two([[8.0, 8.0], [8.0, 8.0]])
    slow = simulate(one, assembled(one, ((0, 1), (2, 3)), (0, 1, 2)))
    fast = simulate(four, assembled(four, ((0, 1), (2, 3)), (0, 1, 2)))
    assert fast < 0.7 * slow
