from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.bound.stage_bounds import AS_GOOD
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible, Reason
from dtfm.scheduler.model.plan import validate
from dtfm.scheduler.schedule import schedule
from tests.scheduler.clusters import even_workload, random_cluster, uniform_cluster


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (4,), (2, 1, 1), (1, 2), (3,)])
def test_pinned_sizes_are_honoured_and_every_replica_has_work(sizes: tuple[int, ...]) -> None:
    cluster, workload = uniform_cluster(4), even_workload()
    plan = schedule(cluster, workload, stages=sizes).plan
    validate(plan, cluster.ids, workload)
    assert tuple(len(stage.replicas) for stage in plan.stages) == sizes
    assert len(plan.idle) == 4 - sum(sizes)
    # Equal devices get equal loads.
    for stage in plan.stages:
        assert min(stage.loads) > 0
        assert max(stage.loads) - min(stage.loads) <= 1


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 7),
    layers=st.integers(1, 9),
    micro_batches=st.integers(1, 12),
    stages=st.none() | st.integers(1, 3),
    unreachable=st.sampled_from([0.0, 0.1]),
)
def test_every_plan_is_valid_and_no_faster_than_its_bound(
    seed: int, count: int, layers: int, micro_batches: int, stages: int | None, unreachable: float
) -> None:
    cluster, workload = random_cluster(seed, count, unreachable), even_workload(layers, micro_batches)
    if stages is not None and stages > min(count, layers):
        with pytest.raises(ValueError, match=r"stages is|nodes are needed"):
            schedule(cluster, workload, stages=stages)
        return
    try:
        decision = schedule(cluster, workload, stages=stages, evaluations=150, generation=3)
    except Infeasible:
        # If all links exist, one node alone is always enough: the model is small.
        possible = unreachable == 0 and stages is None
        assert not possible
        return
    validate(decision.plan, cluster.ids, workload)
    assert decision.plan.generation == 3
    assert stages is None or len(decision.plan.stages) == stages
    assert decision.predicted.iteration_seconds >= decision.lower_bound_seconds > 0
    assert decision.plan.takeovers == ()


def test_a_search_ends_with_a_plan_that_is_as_good_as_any() -> None:
    found = schedule(uniform_cluster(16), even_workload(12, 16), evaluations=100_000)
    assert found.predicted.iteration_seconds <= AS_GOOD * found.lower_bound_seconds
    assert found.evaluations < 10_000


def test_the_number_of_threads_changes_nothing() -> None:
    cluster, workload = random_cluster(5, 12), even_workload()
    one, two = (schedule(cluster, workload, evaluations=4_000, threads=threads) for threads in (1, 2))
    assert one == two


def test_an_expired_deadline_still_gives_a_plan() -> None:
    decision = schedule(random_cluster(5, 9), even_workload(), time_used=lambda: 1.0)
    assert decision.evaluations < 10
    assert decision.plan.stages


def test_a_model_too_large_for_any_node_is_cut_and_too_large_for_all_is_refused_with_the_shortfall() -> None:
    workload = even_workload(layers=12)  # 12 x (2e7 x 4 bytes of state + 16e6 in flight)
    split = schedule(uniform_cluster(4, memory=5e8), workload).plan
    assert len(split.stages) >= 3
    with pytest.raises(Infeasible, match=r"no plan fits the memory: .*n\d holds layers .* lacks 0?\.?\d+\.?\d* MiB"):
        schedule(uniform_cluster(4, memory=2e8), workload)
    with pytest.raises(Infeasible, match="larger than any device"):
        schedule(
            uniform_cluster(12, memory=5e7), workload
        )  # too many nodes for the exact search, and nothing limits the search


def test_unreachable_nodes_are_never_paired() -> None:
    cluster = uniform_cluster(4)
    bandwidth = cluster.bandwidth.copy()
    bandwidth[0, 1:] = 0.0
    plan = schedule(replace(cluster, bandwidth=bandwidth), even_workload()).plan
    assert "n0" in plan.idle or plan.nodes == ("n0",)
    with pytest.raises(Infeasible, match=r"n0 -> n\d \(bandwidth 0\)"):
        schedule(replace(cluster, bandwidth=bandwidth), even_workload(), stages=(2, 2))


@pytest.mark.parametrize("stages", [0, 13, (2, 0), (-1,)])
def test_impossible_stages_are_refused_with_their_value(stages: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="stages is"):
        schedule(uniform_cluster(20), even_workload(layers=12), stages=stages)
    with pytest.raises(Infeasible, match="the cluster has 4: 1 too few"):
        schedule(uniform_cluster(4), even_workload(), stages=(3, 2))


def test_an_incumbent_stays_through_noise_and_goes_when_its_node_is_lost() -> None:
    workload = even_workload()
    cluster = random_cluster(3, 6)
    first = schedule(cluster, workload, evaluations=4000, generation=1)
    assert first.reason is Reason.FIRST
    noise = np.random.default_rng(0).uniform(0.98, 1.02, cluster.bandwidth.shape)
    noisy = replace(cluster, bandwidth=cluster.bandwidth * noise)
    kept = schedule(noisy, workload, first.plan, seed=1, evaluations=500, generation=2)
    assert (kept.reason, kept.plan, kept.predicted.migration_seconds) == (Reason.KEPT, first.plan, 0.0)
    lost = [index for index, node in enumerate(cluster.ids) if node != first.plan.nodes[0]]
    smaller = Cluster(
        tuple(cluster.nodes[index] for index in lost),
        cluster.latency[np.ix_(lost, lost)],
        cluster.bandwidth[np.ix_(lost, lost)],
    )
    moved = schedule(smaller, workload, first.plan, evaluations=300, generation=2)
    assert moved.reason is Reason.NODE_LOST
    assert moved.plan.generation == 2
    validate(moved.plan, smaller.ids, workload)
    other = schedule(cluster, workload, first.plan, stages=(2, 2), evaluations=300, generation=2)
    assert other.reason is Reason.REQUESTED


def test_a_new_node_beside_a_kept_plan_is_idle() -> None:
    workload = even_workload(layers=1, micro_batches=1)
    first = schedule(uniform_cluster(1), workload)
    kept = schedule(uniform_cluster(2), workload, first.plan)
    assert kept.reason is Reason.KEPT
    validate(kept.plan, ("n0", "n1"), workload)
