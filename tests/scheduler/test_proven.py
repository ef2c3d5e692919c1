"""Each stage has a proven node if that is possible: `schedule.py`, and all code that makes or judges plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible, Reason
from dtfm.scheduler.model.plan import Plan, validate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.failover import rerouted
from dtfm.scheduler.schedule import ALL_EQUAL, schedule
from tests.scheduler.clusters import even_workload, random_cluster, uniform_cluster

EVALUATIONS = 600


def marked(cluster: Cluster, proven: set[int], memory: tuple[float, ...] = ()) -> Cluster:
    """The cluster with these nodes proven and the others not, with these memories."""
    nodes = [replace(node, proven=number in proven) for number, node in enumerate(cluster.nodes)]
    return replace(
        cluster,
        nodes=tuple(
            replace(n, memory_bytes=m) for n, m in zip(nodes, memory or [n.memory_bytes for n in nodes], strict=True)
        ),
    )


def alone(cluster: Cluster) -> Cluster:
    """The proven nodes."""
    numbers = [number for number, node in enumerate(cluster.nodes) if node.proven]
    index = np.ix_(numbers, numbers)
    return Cluster(tuple(cluster.nodes[n] for n in numbers), cluster.latency[index], cluster.bandwidth[index])


def bare(plan: Plan, cluster: Cluster) -> list[int]:
    """The stages without a proven node."""
    proven = {node.id for node in cluster.nodes if node.proven}
    return [index for index, stage in enumerate(plan.stages) if proven.isdisjoint(stage.replicas)]


def is_possible(cluster: Cluster, workload: Workload, stages: int | None) -> bool:
    """Whether proven nodes alone could train: with few nodes, the exact search finds a plan if there is one."""
    try:
        schedule(alone(cluster), workload, stages=stages, evaluations=EVALUATIONS)
    except (Infeasible, ValueError):
        return False
    return True


@st.composite
def half_proven(draw: st.DrawFn) -> tuple[Cluster, Workload]:
    """Up to 7 nodes. Some are proven, and some have memory for a part of the model alone."""
    count = draw(st.integers(2, 7))
    proven = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    workload = even_workload(draw(st.integers(2, 8)), draw(st.integers(1, 12)))
    whole = sum(layer.parameter_bytes for layer in workload.layers) * workload.bytes_kept_per_parameter_byte
    shares = draw(st.lists(st.sampled_from([0.3, 0.6, 3.0]), min_size=count, max_size=count))
    memory = tuple(share * whole + 1e8 for share in shares)
    return marked(random_cluster(draw(st.integers(0, 10_000)), count), proven, memory), workload


@settings(max_examples=settings().max_examples // 2)
@given(half_proven(), st.none() | st.integers(1, 3))
def test_each_stage_has_a_proven_node_if_these_could_train_alone_otherwise_all_count_as_equal(
    given_: tuple[Cluster, Workload], stages: int | None
) -> None:
    cluster, workload = given_
    possible = is_possible(cluster, workload, stages)
    try:
        decision = schedule(cluster, workload, stages=stages, evaluations=EVALUATIONS)
    except (Infeasible, ValueError):
        assert not possible
        return
    validate(decision.plan, cluster.ids, workload)
    assert decision.predicted.iteration_seconds >= decision.lower_bound_seconds > 0
    assert decision.sentence.endswith(ALL_EQUAL) == (not possible)
    assert not possible or not bare(decision.plan, cluster)


@settings(max_examples=settings().max_examples // 4)
@given(half_proven())
def test_a_plan_from_before_anybody_was_proven_is_replaced_once_each_stage_can_have_a_proven_node(
    given_: tuple[Cluster, Workload],
) -> None:
    cluster, workload = given_
    nobody = marked(cluster, set())
    try:
        incumbent = schedule(nobody, workload, evaluations=EVALUATIONS, generation=1).plan
    except Infeasible:
        return
    possible = is_possible(cluster, workload, None)
    decision = schedule(cluster, workload, incumbent, evaluations=EVALUATIONS, generation=2)
    if not possible:
        assert decision.sentence.endswith(ALL_EQUAL)
        return
    few = sum(node.proven for node in cluster.nodes) < len(incumbent.stages)
    if decision.reason is Reason.KEPT and few:
        assert ("Proven nodes are too few" in decision.sentence) == bool(bare(incumbent, cluster))
        return
    assert not bare(decision.plan, cluster)
    assert (decision.reason is Reason.NOT_PROVEN) == bool(bare(incumbent, cluster) and not few)


def test_the_first_proven_node_does_not_turn_a_pipeline_into_a_single_stage() -> None:
    cluster, slow_links = uniform_cluster(4, bandwidth=1e6), Workload(even_workload().layers, 8)
    incumbent = schedule(cluster, slow_links, stages=2, evaluations=EVALUATIONS, generation=1).plan
    decision = schedule(marked(cluster, {0}), slow_links, incumbent, evaluations=EVALUATIONS, generation=2)
    assert decision.reason in (Reason.KEPT, Reason.FASTER)
    enough = {cluster.ids.index(node) for node in incumbent.stages[0].replicas}
    decision = schedule(marked(cluster, enough), slow_links, incumbent, stages=2, evaluations=EVALUATIONS, generation=2)
    assert decision.reason is Reason.NOT_PROVEN
    assert not bare(decision.plan, marked(cluster, enough))


def without(cluster: Cluster, lost: str) -> Problem:
    left = [number for number, name in enumerate(cluster.ids) if name != lost]
    index = np.ix_(left, left)
    rest = Cluster(tuple(cluster.nodes[n] for n in left), cluster.latency[index], cluster.bandwidth[index])
    return Problem(rest, even_workload())


def test_a_stage_that_lost_its_last_proven_node_gets_a_new_plan_while_proven_nodes_are_as_many_as_stages() -> None:
    cluster = random_cluster(1, 4)
    plan = schedule(cluster, even_workload(), stages=(2, 2), evaluations=100).plan
    numbers = {name: number for number, name in enumerate(cluster.ids)}
    (lost, _), others = plan.stages[0].replicas, [numbers[node] for node in plan.stages[1].replicas]

    def goes_on(proven: set[int]) -> bool:
        problem = without(marked(cluster, proven), lost)
        return rerouted(plan, problem, [()] * len(problem.workload.layers)) is not None

    assert not goes_on({numbers[lost], *others})
    assert goes_on({numbers[lost], others[0]})
    assert goes_on(set())
    assert goes_on(set(range(4)))


def test_where_a_node_with_the_state_stands_by_a_proven_one_takes_the_seat_of_a_proven_one() -> None:
    cluster = marked(random_cluster(1, 6), {0, 2, 4})
    plan = schedule(cluster, even_workload(), stages=(1, 1), evaluations=EVALUATIONS).plan
    assert not bare(plan, cluster)
    problem = without(cluster, plan.stages[0].replicas[0])
    goes_on = rerouted(plan, problem, [problem.cluster.ids] * len(problem.workload.layers))
    assert goes_on is not None
    assert not bare(goes_on, problem.cluster)


def test_pinned_replicas_have_a_proven_node_in_each_stage() -> None:
    cluster, workload = marked(random_cluster(2, 9), {3, 7}), even_workload()
    plan = schedule(cluster, workload, stages=(3, 2), evaluations=EVALUATIONS).plan
    assert [len(stage.replicas) for stage in plan.stages] == [3, 2]
    assert not bare(plan, cluster)


def test_a_cluster_of_many_nodes_is_searched_with_a_proven_one_in_each_stage() -> None:
    cluster, workload = marked(random_cluster(3, 30), {1, 8, 20}), even_workload(24)
    decision = schedule(cluster, workload, evaluations=3000)
    assert not bare(decision.plan, cluster)
    assert len(decision.plan.nodes) > 3  # others add replicas


def test_a_much_slower_proven_node_stays_beside_the_nodes_that_do_the_work() -> None:
    cluster = marked(random_cluster(4, 4), {0})
    slow = (replace(cluster.nodes[0], flops=1e8), *cluster.nodes[1:])
    plan = schedule(replace(cluster, nodes=slow), even_workload(), evaluations=EVALUATIONS).plan
    (stage,) = plan.stages
    assert "n0" in stage.replicas
    assert len(stage.replicas) > 1
    assert stage.loads[stage.replicas.index("n0")] == 0


def test_where_all_are_proven_or_nobody_is_plans_are_the_same() -> None:
    def decided(proven: set[int], seed: int, count: int, incumbent: Plan | None = None) -> Decision:
        cluster = marked(random_cluster(seed, count), proven)
        return schedule(cluster, even_workload(), incumbent, evaluations=300, seed=seed)

    for seed, count in ((1, 4), (2, 12)):
        one, other = decided(set(range(count)), seed, count), decided(set(), seed, count)
        assert one == other
        assert decided(set(), seed + 9, count, one.plan) == decided(set(range(count)), seed + 9, count, one.plan)
