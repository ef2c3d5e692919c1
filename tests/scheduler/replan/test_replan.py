"""Replanning against an incumbent: who fetches state, how many bytes, and when it is not worth it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.cost.state_transfer import Holdings, fetching_seconds
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.decision import Reason
from dtfm.scheduler.model.keeping import has_room, keepings
from dtfm.scheduler.model.memory import BUS_BYTES_PER_SECOND, LADDER, Checkpointing, Keeping, OptimizerState, in_flight
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, unless_usual, validate
from dtfm.scheduler.model.problem import Draft, Floats, Problem
from dtfm.scheduler.model.sketch import position_of
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from tests.scheduler import yardstick_keeping as yardstick
from tests.scheduler.clusters import any_problem, even_workload, uniform_cluster
from tests.scheduler.cost.yardstick_simulate import simulated_in_python
from tests.scheduler.drafts import drafts
from tests.scheduler.plans import random_draft

STATE = 2e7 * 3  # weights and optimizer state of a layer of even_workload


def two_stages(*replicas: tuple[str, ...]) -> Plan:
    cuts = (0, 6, 12)
    stages = [Stage((cuts[i], cuts[i + 1]), names, ()) for i, names in enumerate(replicas)]
    return from_routes(1, stages, [([names[0] for names in replicas], 8)])


def test_a_joining_node_fetches_from_all_holders_at_once() -> None:
    problem = Problem(uniform_cluster(4, bandwidth=1e8), even_workload())
    holdings = Holdings.of(problem, two_stages(("n0", "n1"), ("n2",)))
    groups, cuts = ((0, 1, 3), (2,)), (0, 6, 12)
    assert holdings.fetch(groups, cuts)[:2] == (1, 6 * STATE)
    # Two donors send half each, but the receiver's own connection is no faster than one link.
    assert holdings.fetch(groups, cuts).seconds == pytest.approx(6 * STATE / 1e8)
    wide = tuple(replace(node, down=1e9) for node in problem.cluster.nodes)
    wide_problem = Problem(replace(problem.cluster, nodes=wide), problem.workload)
    wide_holdings = Holdings.of(wide_problem, two_stages(("n0", "n1"), ("n2",)))
    assert wide_holdings.fetch(groups, cuts).seconds == pytest.approx(6 * STATE / 2 / 1e8 + 1e-3)


def test_a_shifted_cut_transfers_the_layers_between_and_an_unchanged_plan_nothing() -> None:
    problem = Problem(uniform_cluster(3), even_workload())
    holdings = Holdings.of(problem, two_stages(("n0", "n1"), ("n2",)))
    assert holdings.fetch(((0, 1), (2,)), (0, 6, 12)).seconds == 0.0
    assert holdings.fetch(((0, 1), (2,)), (0, 6, 12))[:2] == (0, 0.0)
    assert holdings.fetch(((0, 1), (2,)), (0, 5, 12))[:2] == (1, STATE)
    assert holdings.fetch(((2,), (0, 1)), (0, 6, 12))[:2] == (3, 3 * 6 * STATE)


@given(seed=st.integers(0, 10**6), count=st.integers(2, 8), layers=st.integers(1, 6))
@example(seed=11466, count=2, layers=1)  # from a node of the same machine
def test_the_rough_time_to_fetch_equals_one_node_alone_except_for_latency_and_the_holders_connections(
    seed: int, count: int, layers: int
) -> None:
    """The search's time for a single fetching node is the time that the links and its own connection need.

    Layers that come from different holders count one after the other, though their links carry them at the same time.
    """
    rng = np.random.default_rng(seed)
    problem = any_problem(rng, count, layers)
    draft = random_draft(rng, problem)
    plan = draft.plan(problem.cluster, [()] * len(draft.groups), [()] * len(draft.groups), 1)
    held = Holdings.of(problem, plan)
    node, stage = int(rng.integers(count)), int(rng.integers(len(draft.groups)))
    groups = tuple((node,) if at == stage else () for at in range(len(draft.groups)))
    rough = held.fetching(plan, 1.0).receive_before[node]
    assert (np.diff(rough) >= 0).all()
    exact = held.fetch(groups, draft.cuts).seconds
    alone = rough[draft.cuts[stage + 1]] - rough[draft.cuts[stage]]
    wanted = held.lacking(groups, draft.cuts)[node]
    holders = held.held[:, wanted].any(axis=1) & (problem.bandwidth[:, node] > 0)
    if not wanted.any() or not holders.any():
        assert alone == exact == 0.0
        return
    uplinks = np.bincount(problem.line, _sent(held, wanted, node))[problem.line] / problem.up
    assert exact <= alone * (1 + 1e-9) + problem.latency[holders, node].max() + np.nanmax(uplinks)
    if len(set(map(tuple, held.held[:, wanted].T))) == 1:  # the same holders for every layer
        assert exact >= alone * (1 - 1e-9)


def _sent(held: Holdings, wanted: NDArray[np.bool_], node: int) -> Floats:
    """Bytes that each holder sends to a node that fetches the layers ``wanted`` from all their holders, as links carry."""
    problem = held.problem
    sizes = np.diff(problem.parameters_before) * problem.workload.bytes_moved_per_parameter_byte
    sent = np.zeros(len(problem.flops))
    for layer in np.flatnonzero(wanted):
        rates = problem.bandwidth[:, node] * held.held[:, layer]
        sent += sizes[layer] * rates / max(rates.sum(), 1e-300)
    return sent


def test_layers_that_a_node_holds_cost_nothing_to_fetch_nor_do_layers_that_nobody_holds() -> None:
    problem = Problem(uniform_cluster(4, bandwidth=1e8), even_workload())
    plan = two_stages(("n0", "n1"), ("n2",))
    holdings = Holdings.of(problem, plan)
    fetching = holdings.fetching(plan, 0.25)
    assert fetching.weight == 0.25
    each = STATE / 1e8
    assert fetching.receive_before[0].tolist() == pytest.approx([0.0] * 7 + [each * layer for layer in range(1, 7)])
    # Two nodes hold the first layers, so that the newcomer is limited by its own connection.
    assert fetching.receive_before[3].tolist() == pytest.approx([each * layer for layer in range(13)])
    lost = Holdings(problem, np.zeros_like(holdings.held), holdings.island)
    assert not lost.fetching(plan, 1.0).receive_before.any()


def test_the_one_holder_of_a_stage_that_three_others_want_sends_three_times() -> None:
    problem = Problem(uniform_cluster(4, bandwidth=1e8), even_workload())
    plan = two_stages(("n0",), ("n1",))
    holdings = Holdings.of(problem, plan)
    everyone = position_of(((0, 1, 2, 3),), (0, 12), 4)
    rough = fetching_seconds(holdings.fetching(plan, 1.0), everyone)
    assert rough == pytest.approx(3 * 6 * STATE / 1e8)
    assert holdings.fetch(((0, 1, 2, 3),), (0, 12)).seconds == pytest.approx(rough, rel=1e-2)


def test_state_from_ones_own_machine_does_not_pass_its_line() -> None:
    """n0 and n1 are on one machine, n2 and n3 on another. Each of the newcomers, n1 and n3, fetches from the other node of its
    machine, as fast as that can send. n1 also fetches the other stage over the lines."""
    cluster = uniform_cluster(4, bandwidth=1e8)
    machines = [Line(name, 1e5, 1e5) for name in "ab"]
    nodes = tuple(replace(node, line=machines[i // 2].id) for i, node in enumerate(cluster.nodes))
    problem = Problem(replace(cluster, nodes=nodes, lines=tuple(machines)), even_workload())
    plan = two_stages(("n0",), ("n2",))
    holdings = Holdings.of(problem, plan)
    fetching = holdings.fetching(plan, 1.0)
    for groups, seconds in ((((0, 1), (2, 3)), 6 * STATE / 1e8), (((0, 3), (2, 1)), 6 * STATE / 1e5)):
        rough = fetching_seconds(fetching, position_of(groups, (0, 6, 12), 4))
        assert rough == pytest.approx(seconds)
        assert holdings.fetch(groups, (0, 6, 12)).seconds == pytest.approx(rough, rel=1e-2)


def test_the_holders_on_one_machine_send_over_its_line_once() -> None:
    """n0 and n1 hold a stage on one machine; n2 and n3, elsewhere, want it."""
    cluster = uniform_cluster(4, bandwidth=1e8)
    nodes = tuple(replace(node, line="a") if i < 2 else node for i, node in enumerate(cluster.nodes))
    problem = Problem(replace(cluster, nodes=nodes, lines=(Line("a", 1e6, 1e6),)), even_workload())
    plan = from_routes(1, [Stage((0, 12), ("n0", "n1"), ())], [(["n0"], 8)])
    rough = fetching_seconds(Holdings.of(problem, plan).fetching(plan, 1.0), position_of(((0, 1, 2, 3),), (0, 12), 4))
    assert rough == pytest.approx(2 * 12 * STATE / 1e6)


def test_a_joining_node_is_used_only_when_the_horizon_pays_for_its_transfer() -> None:
    workload = even_workload()
    slow_links = uniform_cluster(3, flops=1e12, bandwidth=1e8)
    first = schedule(uniform_cluster(2, flops=1e12, bandwidth=1e8), workload, generation=1)
    patient = schedule(slow_links, workload, first.plan, generation=2, horizon=1e5)
    assert patient.reason is Reason.FASTER
    assert "n2" in patient.plan.nodes
    assert " nodes fetch " in patient.sentence
    assert patient.predicted.migration_seconds > 0
    hasty = schedule(slow_links, workload, first.plan, generation=2, horizon=5.0)
    assert (hasty.reason, hasty.plan.idle, " fetch " in hasty.sentence) == (Reason.KEPT, ("n2",), False)
    assert hasty.plan.generation == 1


def test_when_a_replica_is_lost_the_others_keep_their_stages() -> None:
    workload = even_workload()
    cluster = uniform_cluster(6, flops=1e12)
    first = schedule(cluster, workload, stages=(3, 3), generation=1).plan
    left = tuple(node for node in cluster.nodes if node.id != first.stages[0].replicas[0])
    smaller = Cluster(left, cluster.latency[:5, :5], cluster.bandwidth[:5, :5])
    moved = schedule(smaller, workload, first, stages=2, generation=2, horizon=5.0)
    assert moved.reason is Reason.NODE_LOST
    for node in left:
        before, after = first.stage_of(node.id), moved.plan.stage_of(node.id)
        assert after in (before, None)
    validate(moved.plan, smaller.ids, workload)


def test_repeated_replanning_under_noise_keeps_the_plan() -> None:
    workload = even_workload()
    rng = np.random.default_rng(7)
    cluster = uniform_cluster(5, flops=1e12)
    plan = schedule(cluster, workload, generation=1).plan
    for generation in range(2, 6):
        noise = rng.uniform(0.98, 1.02, cluster.bandwidth.shape)
        nodes = tuple(replace(node, flops=node.flops * rng.uniform(0.99, 1.01)) for node in cluster.nodes)
        noisy = Cluster(nodes, cluster.latency, cluster.bandwidth * noise)
        decision = schedule(noisy, workload, plan, seed=generation, generation=generation, evaluations=200)
        assert (decision.reason, decision.plan) == (Reason.KEPT, plan)


@given(drafts(), st.data())
def test_a_plan_is_judged_by_its_own_ways_to_keep_what_nodes_need(
    drawn: tuple[Problem, Draft], data: st.DataObject
) -> None:
    problem, draft = drawn
    ways = st.sampled_from(problem.workload.ways)
    said = draft._replace(way=np.array([LADDER.index(data.draw(ways)) for _ in draft.node]))
    kept = keepings(problem, said)
    assert [way for stage in kept for way in stage] == [LADDER[way] for way in said.way]
    fit = [
        yardstick.kept(problem.workload, draft.cuts[stage], draft.cuts[stage + 1], way).lacking(
            problem, node, min(in_flight(stage, len(draft.groups)), problem.workload.micro_batches)
        )
        < 1.0
        for stage, group in enumerate(draft.groups)
        for node, way in zip(group, kept[stage], strict=True)
    ]
    assert has_room(problem, said) == all(fit)
    if all(fit):
        assert simulate(problem, said) == pytest.approx(simulated_in_python(problem, said), rel=1e-9)


NONE, LAYER = map(Keeping, Checkpointing)
HOSTED = Keeping(Checkpointing.NONE, OptimizerState.HOST)


def alone(memory: float, *, flops: float = 1e12, host: float | None = None) -> Cluster:
    node = Node("a", flops, memory, host_memory_bytes=host)
    return Cluster((node,), np.zeros((1, 1)), np.zeros((1, 1)))


def kept_by(keeping: Keeping) -> Plan:
    return from_routes(1, [Stage((0, 3), ("a",), (), keeping=unless_usual((keeping,)))], [(("a",), 4)])


ANY_WAY = Workload(
    tuple(Layer(f"layer{i}", 1e9, 100.0, 10.0, 60.0, 5.0) for i in range(3)),
    4,
    checkpointing=None,
    optimizer_state=None,
)
# On the device 1200 bytes of state, and 185 of activations, or 85 by layer. With the state in the host's memory 600 and 900.


@pytest.mark.parametrize(
    ("memory", "before", "reason", "after"),
    [
        (1386.0, NONE, Reason.KEPT, NONE),
        (1286.0, NONE, Reason.INFEASIBLE, LAYER),
        (1286.0, LAYER, Reason.KEPT, LAYER),
        (1386.0, LAYER, Reason.FASTER, NONE),  # a quarter of the step
        (1386.0, HOSTED, Reason.KEPT, HOSTED),
        (784.0, HOSTED, Reason.INFEASIBLE, Keeping(Checkpointing.LAYER, OptimizerState.HOST)),
    ],
)
def test_the_plan_in_force_is_judged_by_its_own_ways(
    memory: float, before: Keeping, reason: Reason, after: Keeping
) -> None:
    decision = schedule(alone(memory, host=1e4), ANY_WAY, kept_by(before), generation=2)
    assert decision.reason is reason
    assert (decision.plan.stages[0].keeping or (NONE,)) == (after,)
    passes = 4 if after.checkpointing is Checkpointing.LAYER else 3
    bus = 600.0 / BUS_BYTES_PER_SECOND if after.optimizer_state is OptimizerState.HOST else 0.0
    assert decision.predicted.iteration_seconds == pytest.approx(passes * 4 * 3e9 / 1e12 + bus, rel=1e-9)


def test_ways_that_the_run_no_longer_allows_are_given_up() -> None:
    device = replace(ANY_WAY, optimizer_state=OptimizerState.DEVICE)
    decision = schedule(alone(1386.0, host=1e4), device, kept_by(HOSTED), generation=2)
    assert (decision.reason, decision.plan.stages[0].keeping) == (Reason.REQUESTED, ())


def test_state_comes_back_from_the_host_where_its_way_over_the_bus_takes_long() -> None:
    """Layers of 1e9 bytes pass the bus in half a second. The device could compute the micro-batches twice in that time."""
    heavy = replace(ANY_WAY, layers=tuple(replace(layer, parameter_bytes=1e9) for layer in ANY_WAY.layers))
    decision = schedule(alone(1e11, flops=1e11, host=1e11), heavy, kept_by(HOSTED), generation=2)
    assert (decision.reason, decision.plan.stages[0].keeping) == (Reason.FASTER, ())
    assert decision.predicted.iteration_seconds == pytest.approx(3 * 4 * 3e9 / 1e11, rel=1e-9)


def test_a_workload_of_another_length_gets_a_new_plan() -> None:
    plan = schedule(uniform_cluster(2), even_workload(layers=12)).plan
    decision = schedule(uniform_cluster(2), even_workload(layers=3), plan, generation=2)
    assert decision.reason is Reason.REQUESTED
    assert decision.plan.stages[-1].layers[1] == 3


def test_a_horizon_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"horizon is 0\.0; it must be a finite number of seconds above 0"):
        schedule(Cluster((Node("a", 1e12, 1e10),), np.zeros((1, 1)), np.zeros((1, 1))), even_workload(), horizon=0.0)
