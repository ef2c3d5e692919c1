"""The search with the iteration objective, against enumeration and simple expectations."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.formats.paper import Network, paper_network, paper_workload
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, random_cluster, shuffled, uniform_cluster
from tests.scheduler.enumeration import all_groups


@pytest.mark.parametrize("seed", range(2))
def test_on_few_nodes_their_order_does_not_matter(seed: int) -> None:
    cluster, workload = random_cluster(seed, 4), even_workload(layers=4, micro_batches=4, activation=3e6)
    costs = [schedule(shuffled(cluster, order), workload).predicted.iteration_seconds for order in range(3)]
    assert costs == pytest.approx([costs[0]] * 3, rel=1e-9)


@pytest.mark.soak
def test_on_more_nodes_their_order_matters_no_more_than_the_seed() -> None:
    cluster, workload = random_cluster(4, 8), even_workload(layers=6)
    ordered, seeded = (
        [
            schedule(shuffled(cluster, order), workload, seed=seed, evaluations=20_000).predicted.iteration_seconds
            for order, seed in variants
        ]
        for variants in ([(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 0), (0, 1), (0, 2), (0, 3)])
    )
    assert min(ordered) <= max(seeded)
    assert max(ordered) / min(ordered) <= 1.1 * max(seeded) / min(seeded)


def test_all_groups_counts_ordered_partitions_of_every_subset() -> None:
    assert len(set(all_groups(4, Shape(most_stages=4)))) == 149
    assert set(all_groups(3, Shape(sizes=(1, 1), most_stages=2))) == {
        ((a,), (b,)) for a in range(3) for b in range(3) if a != b
    }


TWELVE, TO_SHARE = uniform_cluster(12, flops=1e13), even_workload(layers=8, micro_batches=24)


@pytest.fixture(scope="module")
def alone() -> float:
    """Seconds per step of twelve nodes."""
    return schedule(TWELVE, TO_SHARE, evaluations=4_000).predicted.iteration_seconds


@pytest.mark.parametrize("handicap", ["speed", "link"])
def test_a_node_at_one_percent_stays_idle_and_slows_nobody_down(handicap: str, alone: float) -> None:
    snail = Node("snail", 1e11 if handicap == "speed" else 1e13, 8e9)
    bandwidth = np.full((13, 13), 1e8)
    if handicap == "link":
        bandwidth[12, :] = bandwidth[:, 12] = 1e6
    cluster = Cluster((*TWELVE.nodes, snail), np.full((13, 13), 1e-3), bandwidth)
    together = schedule(cluster, TO_SHARE, evaluations=4_000)
    assert "snail" in together.plan.idle
    assert "snail" in together.sentence
    assert together.predicted.iteration_seconds <= 1.02 * alone


@pytest.mark.parametrize(("houses", "in_each"), [(2, 2), (3, 4)])
def test_where_links_share_a_narrow_relay_the_plan_crosses_it_as_seldom_as_it_can(houses: int, in_each: int) -> None:
    """A stage per node, as none has memory for two. All links are alike, but those between houses lead over one relay."""
    count = houses * in_each
    cluster = shuffled(uniform_cluster(count, memory=1.1e8), 0)
    house = {f"n{number}": number // in_each for number in range(count)}
    houses_of = np.array([house[node.id] for node in cluster.nodes])
    via = np.where(houses_of[:, None] == houses_of[None, :], -1, count)
    narrow = replace(cluster, lines=(Line("relay", up=2e5, down=2e5),), via=via)
    plan = schedule(narrow, even_workload(layers=count, activation=1e5), evaluations=10_000).plan
    assert [len(stage.replicas) for stage in plan.stages] == [1] * count
    order = [house[stage.replicas[0]] for stage in plan.stages]
    assert sum(a != b for a, b in pairwise(order)) == houses - 1


def test_gpus_of_one_machine_are_planned_together_as_their_own_traffic_does_not_pass_its_line() -> None:
    """Two machines of four: links are fast within each, and between them as fast as either's line."""
    cluster, machine = uniform_cluster(8, flops=1e13, bandwidth=1e9), np.arange(8) // 4
    links = np.where(machine[:, None] == machine, 1e9, 1e6)
    each = replace(cluster, bandwidth=links, nodes=tuple(replace(node, up=1e6, down=1e6) for node in cluster.nodes))
    shared = replace(
        each,
        nodes=tuple(replace(node, line=f"m{at}") for node, at in zip(cluster.nodes, machine, strict=True)),
        lines=(Line("m0", 1e6, 1e6), Line("m1", 1e6, 1e6)),
    )
    workload = even_workload(layers=8, micro_batches=16, activation=1e5)
    blind, aware = (schedule(cluster, workload, evaluations=4_000) for cluster in (each, shared))
    assert aware.predicted.iteration_seconds < 0.7 * simulate(Problem(shared, workload), draft_of(blind.plan, shared))


def test_a_free_search_is_no_worse_than_one_whose_groups_are_given() -> None:
    """Eight regions of eight nodes suit eight stages of eight by far, and 7 or 9 stages not at all."""
    cluster, workload = shuffled(paper_network(Network.WORLDWIDE), 0), paper_workload(layers=40, batch=1024)
    free, pinned = (schedule(cluster, workload, stages=stages, evaluations=2_000) for stages in (None, (8,) * 8))
    assert free.predicted.iteration_seconds <= 1.02 * pinned.predicted.iteration_seconds


def test_one_device_is_the_plan_when_it_is_enough_and_links_are_poor() -> None:
    nodes = (Node("slow", 2e12, 8e9), Node("fast", 1e13, 8e9), Node("other", 2e12, 8e9))
    cluster = Cluster(nodes, np.full((3, 3), 0.2), np.full((3, 3), 1e5))
    plan = schedule(cluster, even_workload()).plan
    assert plan.nodes == ("fast",)
    assert plan.idle == ("slow", "other")


def test_faster_devices_get_more_layers_or_more_micro_batches() -> None:
    nodes = (Node("slow", 1e12, 8e9), Node("fast", 3e12, 8e9))
    cluster = Cluster(nodes, np.full((2, 2), 1e-4), np.full((2, 2), 1e9))
    split = schedule(cluster, even_workload(layers=8), stages=(1, 1)).plan
    layers = {stage.replicas[0]: stage.layers[1] - stage.layers[0] for stage in split.stages}
    assert layers == {"slow": 2, "fast": 6}
    together = schedule(cluster, even_workload(micro_batches=8), stages=(2,)).plan
    assert dict(zip(together.nodes, together.stages[0].loads, strict=True)) == {"slow": 2, "fast": 6}


def test_improvements_are_reported_as_they_are_found() -> None:
    told: list[tuple[int, float]] = []
    found = schedule(
        random_cluster(1, 8),
        even_workload(),
        evaluations=600,
        improved=lambda evaluations, seconds: told.append((evaluations, seconds)),
    )
    assert told
    assert [evaluations for evaluations, _ in told] == sorted(evaluations for evaluations, _ in told)
    assert [seconds for _, seconds in told] == sorted({seconds for _, seconds in told}, reverse=True)
    # Plans of walks are told with their estimated seconds. The simulation of such a plan may take a little longer.
    assert 0.8 * found.predicted.iteration_seconds < told[-1][1] <= found.predicted.iteration_seconds * (1 + 1e-9)
