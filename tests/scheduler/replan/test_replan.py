"""Replanning against an incumbent: who fetches state, how many bytes, and when it is not worth it."""

from dataclasses import replace

import numpy as np
import pytest

from dtfm.scheduler.cost.state_transfer import Holdings
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Reason, Why
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, validate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, uniform_cluster

STATE = 2e7 * 3  # weights and optimizer state of a layer of even_workload


def two_stages(*replicas: tuple[str, ...]) -> Plan:
    cuts = (0, 6, 12)
    stages = [Stage((cuts[i], cuts[i + 1]), names, ()) for i, names in enumerate(replicas)]
    return from_routes(1, stages, [([names[0] for names in replicas], 8)])


def test_a_joining_node_fetches_from_all_holders_at_once() -> None:
    problem = Problem(uniform_cluster(4, bandwidth=1e8), even_workload())
    holdings = Holdings.of(problem, two_stages(("n0", "n1"), ("n2",)))
    groups, cuts = ((0, 1, 3), (2,)), (0, 6, 12)
    (transfer,) = holdings.transfers(groups, cuts)
    assert (transfer.node, transfer.layers, transfer.bytes, transfer.why) == (
        "n3",
        tuple(range(6)),
        6 * STATE,
        Why.JOINS,
    )
    # Two donors send half each, but the receiver's own connection is no faster than one link.
    assert holdings.seconds(groups, cuts) == pytest.approx(6 * STATE / 1e8)
    wide = tuple(replace(node, down=1e9) for node in problem.cluster.nodes)
    wide_problem = Problem(replace(problem.cluster, nodes=wide), problem.workload)
    wide_holdings = Holdings.of(wide_problem, two_stages(("n0", "n1"), ("n2",)))
    assert wide_holdings.seconds(groups, cuts) == pytest.approx(6 * STATE / 2 / 1e8 + 1e-3)


def test_a_shifted_cut_transfers_the_layers_between_and_an_unchanged_plan_nothing() -> None:
    problem = Problem(uniform_cluster(3), even_workload())
    holdings = Holdings.of(problem, two_stages(("n0", "n1"), ("n2",)))
    assert holdings.seconds(((0, 1), (2,)), (0, 6, 12)) == 0.0
    assert holdings.transfers(((0, 1), (2,)), (0, 6, 12)) == ()
    (widens,) = holdings.transfers(((0, 1), (2,)), (0, 5, 12))
    assert (widens.node, widens.layers, widens.why) == ("n2", (5,), Why.WIDENS)
    assert {transfer.why for transfer in holdings.transfers(((2,), (0, 1)), (0, 6, 12))} == {Why.MOVES}


def test_a_nodes_own_bytes_need_memory_and_are_not_transferred() -> None:
    cluster, shared = uniform_cluster(3), even_workload()
    more = replace(shared, own_bytes_per_parameter_byte=2.0)
    plan, groups, cuts = two_stages(("n0",), ("n1",)), ((0, 2), (1,)), (0, 6, 12)
    with_own, without = Problem(cluster, more), Problem(cluster, shared)
    assert (with_own.stage_bytes(cuts) > without.stage_bytes(cuts)).all()
    moving = [Holdings.of(problem, plan).seconds(groups, cuts) for problem in (with_own, without)]
    assert moving[0] == moving[1] > 0


def test_a_joining_node_is_used_only_when_the_horizon_pays_for_its_transfer() -> None:
    workload = even_workload()
    slow_links = uniform_cluster(3, flops=1e12, bandwidth=1e8)
    first = schedule(uniform_cluster(2, flops=1e12, bandwidth=1e8), workload, generation=1)
    patient = schedule(slow_links, workload, first.plan, generation=2, horizon=1e5)
    assert patient.reason is Reason.FASTER
    assert "n2" in patient.plan.nodes
    assert {transfer.node for transfer in patient.transfers} >= {"n2"}
    assert patient.predicted.migration_seconds > 0
    hasty = schedule(slow_links, workload, first.plan, generation=2, horizon=5.0)
    assert (hasty.reason, hasty.plan.idle, hasty.transfers) == (Reason.KEPT, ("n2",), ())
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


def test_a_workload_of_another_length_gets_a_new_plan() -> None:
    plan = schedule(uniform_cluster(2), even_workload(layers=12)).plan
    decision = schedule(uniform_cluster(2), even_workload(layers=3), plan, generation=2)
    assert decision.reason is Reason.REQUESTED
    assert decision.plan.stages[-1].layers[1] == 3


def test_a_horizon_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"horizon is 0\.0; it must be a finite number of seconds above 0"):
        schedule(Cluster((Node("a", 1e12, 1e10),), np.zeros((1, 1)), np.zeros((1, 1))), even_workload(), horizon=0.0)
