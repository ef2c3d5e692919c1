"""The event simulation against sums worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler.plans import assembled, chains_of

SECOND = 1e12  # FLOPs that a node of these tests computes in a second


RELAYED = np.array([[-1, 4, 4, 4], [4, -1, 4, 4], [4, 4, -1, 4], [4, 4, 4, -1]])
"""All links of four nodes lead over the first relay."""


def problem_of(
    nodes: int, layers: int, micro_batches: int, latency: float, bandwidth: float, **limits: float
) -> Problem:
    """One second of forward per layer and micro-batch; 8 bytes of activation, 6 bytes of parameters per layer."""
    cluster = Cluster(
        tuple(Node(f"n{index}", SECOND, 1e9, **limits) for index in range(nodes)),  # type: ignore[arg-type]
        np.full((nodes, nodes), latency),
        np.full((nodes, nodes), bandwidth),
    )
    return Problem(cluster, Workload(tuple(Layer("", SECOND, 6.0, 8.0) for _ in range(layers)), micro_batches))


def plan(problem: Problem, *groups: tuple[int, ...]) -> Draft:
    layers = len(problem.activation)
    cuts = tuple(layers * stage // len(groups) for stage in range(len(groups) + 1))
    return assembled(problem, groups, cuts)


def estimated(problem: Problem, *groups: tuple[int, ...]) -> float:
    draft = plan(problem, *groups)
    return Evaluator(problem, keep_idle_hands=True).estimated(draft.groups, draft.cuts).seconds


def test_one_node_computes_forward_and_twice_as_long_backward() -> None:
    problem = problem_of(1, layers=2, micro_batches=5, latency=1, bandwidth=1)
    assert simulate(problem, plan(problem, (0,))) == 3 * 2 * 5


def test_one_micro_batch_goes_forward_and_back() -> None:
    problem = problem_of(2, layers=2, micro_batches=1, latency=0.5, bandwidth=4)
    transfer = 0.5 + 8 / 4
    assert simulate(problem, plan(problem, (0,), (1,))) == 1 + transfer + 1 + 2 + transfer + 2


def test_two_equal_stages_with_a_fast_link_lose_one_micro_batch_of_time() -> None:
    problem = problem_of(2, layers=2, micro_batches=10, latency=0, bandwidth=1e12)
    assert simulate(problem, plan(problem, (0,), (1,))) == pytest.approx(3 * (10 + 1))


def test_a_slow_link_sets_the_pace_in_each_direction_on_its_own() -> None:
    # 8 seconds of transfer per micro-batch each way: both directions overlap, but exceed the 3 seconds of computing.
    problem = problem_of(2, layers=2, micro_batches=10, latency=0, bandwidth=1)
    seconds = simulate(problem, plan(problem, (0,), (1,)))
    assert 10 * 8 < seconds < 10 * 8 + 2 * 8 + 3 * 4


def test_replicas_reduce_shards_and_gather_their_sums() -> None:
    problem = problem_of(2, layers=1, micro_batches=2, latency=0.25, bandwidth=2)
    shard = 0.25 + 3 / 2
    assert simulate(problem, plan(problem, (0, 1))) == 3 + shard + shard


def test_reduction_of_late_layers_hides_behind_the_backward_of_early_ones() -> None:
    problem = problem_of(2, layers=4, micro_batches=2, latency=0, bandwidth=6)
    shard = 3 / 6
    assert simulate(problem, plan(problem, (0, 1))) == 3 * 4 + shard + shard


def test_traffic_over_one_relay_goes_one_after_the_other() -> None:
    direct = problem_of(4, layers=1, micro_batches=4, latency=0, bandwidth=1)
    cluster = replace(direct.cluster, lines=(Line("relay", up=0.5, down=9.0),), via=RELAYED)
    problem, draft = Problem(cluster, direct.workload), plan(direct, (0, 1, 2, 3))
    # Each of four sends a shard of 1.5 bytes to each other, twice; all leave the relay at half a byte per second.
    assert simulate(direct, draft) == 3 + 2 * 3 * 1.5
    assert simulate(problem, draft) == 3 + 2 * 12 * 1.5 / 0.5


def test_traffic_out_of_a_machine_shares_its_line_and_traffic_within_passes_none() -> None:
    apart = problem_of(4, layers=1, micro_batches=4, latency=0, bandwidth=8, up=1.0, down=1.0)
    nodes = tuple(replace(node, line="m" if number < 2 else "") for number, node in enumerate(apart.cluster.nodes))
    cluster = replace(apart.cluster, nodes=nodes, lines=(Line("m", up=1.0, down=1.0),))
    problem, draft = Problem(cluster, apart.workload), plan(apart, (0, 1, 2, 3))
    # Each of four sends a shard of 1.5 bytes to each other, twice; of two on a machine, to the two elsewhere.
    assert simulate(apart, draft) == 3 + 2 * 3 * 1.5
    assert simulate(problem, draft) == 3 + 2 * 4 * 1.5
    assert simulate(problem, plan(problem, (0, 1))) == 2 * 3 + 2 * 3 / 8
    assert estimated(problem, (0, 1, 2, 3)) > 1.3 * estimated(apart, (0, 1, 2, 3)) - 1


def test_a_node_that_relays_for_others_shares_its_connection_with_them() -> None:
    alone = problem_of(3, layers=3, micro_batches=8, latency=0, bandwidth=8, up=1.0, down=1.0)
    via = np.array([[-1, -1, 1], [-1, -1, -1], [1, -1, -1]])
    problem = Problem(replace(alone.cluster, via=via), alone.workload)
    in_a_row = plan(problem, (0,), (1,), (2,))  # nothing is relayed
    assert simulate(problem, in_a_row) == simulate(alone, in_a_row)
    beside = plan(problem, (0, 1), (2,))
    assert [load.tolist() for load in beside.loads] == [[2, 6], [8]]
    # Node 2 receives 8 times 8 bytes. Node 1 sends 6 times 8, and 2 times 8 for node 0 each way, which is 16 more.
    assert simulate(problem, beside) == simulate(alone, beside) + 16


def test_a_connection_shared_by_two_links_sends_one_after_the_other() -> None:
    free = problem_of(3, layers=1, micro_batches=3, latency=0, bandwidth=1)
    shared = problem_of(3, layers=1, micro_batches=3, latency=0, bandwidth=1, up=0.5)
    assert simulate(free, plan(free, (0, 1, 2))) == 3 + 2 * 4  # a shard of 2 bytes to each of two, twice
    assert simulate(shared, plan(shared, (0, 1, 2))) == 3 + 2 * 8


def test_replicas_that_share_a_node_are_both_busy_from_the_beginning() -> None:
    problem = problem_of(3, layers=3, micro_batches=8, latency=0, bandwidth=1e12)
    draft = assembled(problem, ((0,), (1, 2)), (0, 1, 3))
    assert chains_of(draft).tolist() == [[0, 1], [0, 2]] * 4
    # 8 micro-batches take the first node 24 seconds, and each of the others 24; one after the other would take them 48.
    assert simulate(problem, draft) < 24 + 12
