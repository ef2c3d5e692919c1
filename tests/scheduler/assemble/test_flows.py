"""Who sends how many micro-batches to whom."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
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
    """The plan, the sketch that it was made in, and the seconds for which its nodes would be busy if links demanded nothing.

    None where links are missing.
    """
    t, sketch = tables(problem), empty_sketch(len(problem.flops))
    position = position_of(groups, cuts, len(problem.flops))
    gather_members(position, sketch)
    add_up(t, sketch.sums, position.place, len(groups))
    if np.isinf(rough_seconds(t, sketch, len(groups), position.cuts, np.inf, 0.0)):
        return None
    longest = share_out(t, sketch, len(groups))
    if not connect(t, sketch, len(groups), position.cuts, longest):
        return None
    return draft_of_sketch(sketch, cuts), sketch, longest


@settings(max_examples=100, deadline=None)
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


def test_nodes_whose_links_lead_nowhere_leave_their_loads_to_others() -> None:
    """Node 0 reaches node 3 and is reached by node 2, but nothing comes back."""
    problem = two_by_two([[8.0, 8.0], [8.0, 8.0]])
    bandwidth = problem.cluster.bandwidth.copy()
    bandwidth[0, 2] = bandwidth[3, 0] = 0.0
    broken = Problem(Cluster(problem.cluster.nodes, problem.latency, bandwidth), problem.workload)
    assert assembled(broken, ((0, 1), (2, 3)), (0, 1, 2)).loads[0].tolist()[-1] == 16


def test_a_plan_whose_stages_have_no_way_through_is_priced_as_one_that_does_not_work() -> None:
    """Each stage has links to the next one, but stage 0 reaches node 1 alone, which reaches node 3 alone, which leads nowhere."""
    speeds = np.zeros((6, 6))
    for a, b in ((0, 1), (1, 3), (2, 4), (4, 5)):
        speeds[a, b] = speeds[b, a] = 8.0
    groups, cuts = ((0,), (1, 2), (3, 4), (5,)), (0, 1, 2, 3, 4)
    nodes = tuple(Node(f"n{i}", SECOND, 1e9, up=1e12, down=1e12) for i in range(6))
    workload = Workload((Layer("", SECOND, 0.0, 8.0),) * 4, 16)
    for through in (False, True):
        if through:
            speeds[3, 5] = speeds[5, 3] = 8.0
        speeds[1, 2] = speeds[2, 1] = speeds[3, 4] = speeds[4, 3] = 8.0  # for reductions
        problem = Problem(Cluster(nodes, np.zeros((6, 6)), speeds), workload)
        price = price_of(tables(problem), position_of(groups, cuts, 6), empty_sketch(6), False)
        assert (price < NO_LINK) == through


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
        busy = [float((loads * paces).max()) for loads, paces in zip(draft.loads, alone, strict=True)]
        one = max(float(paces[loads > 0].max()) for loads, paces in zip(draft.loads, alone, strict=True))
        links = []
        for a, b, flows, cut in zip(draft.groups, draft.groups[1:], draft.flows, draft.cuts[1:], strict=False):
            slower = np.maximum(problem.slowness[np.ix_(a, b)], problem.slowness[np.ix_(b, a)].T)
            links.append(FREE * problem.activation[cut - 1] * slower)
            busy.append(float((flows * np.where(flows, links[-1], 0.0)).max()))
            one = max(one, float(links[-1][flows > 0].max()))
        possible = max(longest, problem.workload.micro_batches / maximum_flow(alone, links))
        ratios.append((max(busy) - one) / possible)
    assert len(ratios) > 100
    assert np.quantile(ratios, 0.9) <= 1.0 + 1e-9
    assert max(ratios) <= 1.1


def maximum_flow(alone: list[Floats], links: list[Floats]) -> float:
    """Micro-batches per second through nodes and links that need so many seconds for each, if they were divisible."""
    with np.errstate(divide="ignore"):
        most = np.concatenate([(1 / np.maximum(paces, 1e-12)).ravel() for paces in links])
    begin = np.cumsum([0, *(paces.size for paces in links)])
    cell = [np.arange(paces.size).reshape(paces.shape) + at for paces, at in zip(links, begin, strict=False)]
    limits, through, kept = [], [], []
    for stage, paces in enumerate(alone):
        for node, pace in enumerate(paces):
            into, out = np.zeros(len(most)), np.zeros(len(most))
            if stage > 0:
                into[cell[stage - 1][:, node]] = 1
            if stage < len(links):
                out[cell[stage][node]] = 1
            limits.append(into if stage > 0 else out)
            through.append(1 / pace)
            if 0 < stage < len(links):
                kept.append(into - out)
    wanted = np.zeros(len(most))
    wanted[cell[0]] = -1
    scale = max(through)
    result = linprog(
        wanted,
        np.array(limits),
        np.array(through) / scale,
        np.array(kept) if kept else None,
        np.zeros(len(kept)) if kept else None,
        [(0.0, one / scale) for one in most],
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
