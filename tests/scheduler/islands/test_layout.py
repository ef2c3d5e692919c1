"""Which islands are drawn, and how they go on when one is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.scheduler.cost.exchange import exchange_seconds, tokens_needed
from dtfm.scheduler.islands.layout import QUICK, carried_on, lay_out
from dtfm.scheduler.islands.partition import partitions, with_newcomers
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.cluster import Cluster, Line, Node
from dtfm.scheduler.model.decision import Reason
from dtfm.scheduler.model.plan import Plan, Stage, check, from_routes, joined
from dtfm.scheduler.model.population import Island, Member
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.rounds import spread
from dtfm.scheduler.replan.price import Terms, price_of_layout
from tests.scheduler.clusters import even_workload, uniform_cluster
from tests.scheduler.llama import llama

MEGABIT = 1e6 / 8
LENGTH = 30
#: Of SparseLoCo's codec (arXiv 2508.15706): 64 of 4,096 elements of 32 bits, in 2 bits and 12 of place.
SPARSE = 64 * 14 / (4096 * 32)


def cities(sizes: list[int], inside: float, between: float) -> Cluster:
    """Nodes n0, n1, ... of RTX 4090s, city by city."""
    city = np.repeat(np.arange(len(sizes)), sizes)
    bandwidth = np.where(city[:, None] == city, inside, between)
    latency = np.where(city[:, None] == city, 1e-3, 40e-3)
    nodes = tuple(Node(f"n{n}", 80e12, 24e9, host_memory_bytes=64e9) for n in range(len(city)))
    return Cluster(nodes, latency, bandwidth)


def islands(plan: Plan) -> list[set[str]]:
    return sorted(({*island.nodes} for island in plan.islands), key=min)


def test_over_fast_lines_there_is_one_island() -> None:
    workload = replace(llama("1.1B", 512), sent_per_exchanged_byte=SPARSE)
    decision = lay_out(cities([8], 1250e6, 1250e6), workload, length=LENGTH, evaluations=200)
    assert len(decision.plan.islands) == 1


def test_over_home_lines_each_gpu_that_holds_the_model_is_an_island_and_all_are_busy() -> None:
    cluster, workload = (
        cities([1] * 8, 100 * MEGABIT, 100 * MEGABIT),
        replace(llama("1.1B"), sent_per_exchanged_byte=SPARSE),
    )
    decision = lay_out(cluster, workload, length=LENGTH, evaluations=200)
    assert islands(decision.plan) == [{f"n{n}"} for n in range(8)]
    step = decision.predicted.iteration_seconds
    exchange = exchange_seconds(cluster, workload, decision.plan)
    computing = 64 / 8 * sum(layer.forward_flops for layer in workload.layers) * 3 / 80e12
    assert LENGTH * computing / (LENGTH * step + exchange) >= 0.9


@pytest.mark.soak
def test_there_are_no_more_islands_than_pay_for_the_tokens_that_they_need() -> None:
    lines, length = cities([1] * 32, 100 * MEGABIT, 100 * MEGABIT), 100
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32)

    def laid_out(nodes: int) -> tuple[int, float]:
        found = lay_out(lines.only(range(nodes)), workload, length=length, evaluations=QUICK)
        each = found.predicted.iteration_seconds + found.predicted.exchange_seconds / length
        return len(found.plan.islands), each * tokens_needed(len(found.plan.islands), workload, length)

    (few, slow), (some, best), (most, no_better) = map(laid_out, (8, 16, 32))
    assert (few, some, most) == (8, 16, 16)
    assert slow > best == pytest.approx(no_better)


def test_the_sentence_says_what_islands_cost_in_tokens() -> None:
    lines = cities([1] * 8, 100 * MEGABIT, 100 * MEGABIT)
    sentence = lay_out(
        lines, replace(llama("1.1B"), sent_per_exchanged_byte=SPARSE), length=LENGTH, evaluations=50
    ).sentence
    assert sentence.endswith(
        "For the same loss they need some 30% more tokens than one island, as other runs have shown."
    )


def test_tokens_needed_are_those_that_were_measured() -> None:
    """With 10 million parameters, as docs/measurements.md has it."""
    layer = replace(even_workload(layers=1, micro_batches=8).layers[0], parameter_bytes=40e6)
    small = replace(even_workload(layers=1, micro_batches=8), layers=(layer,))
    assert tokens_needed(1, small, LENGTH) == 1
    for islands_, every, measured in ((2, 30, 1.16), (8, 10, 1.99), (8, 30, 2.75), (8, 100, 3.5)):
        assert tokens_needed(islands_, small, every) == pytest.approx(measured, rel=0.1)


def test_a_gpu_whose_host_has_no_room_for_what_exchanges_need_is_no_island_of_its_own() -> None:
    cluster = cities([1] * 4, 100 * MEGABIT, 100 * MEGABIT)
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=SPARSE, outer_bytes_per_parameter_byte=1.0)
    poor = tuple(replace(node, host_memory_bytes=4e9 if node.id == "n0" else 16e9) for node in cluster.nodes)
    decision = lay_out(replace(cluster, nodes=poor), workload, length=LENGTH, evaluations=200)
    assert {"n0"} not in islands(decision.plan)
    assert {"n1"} in islands(decision.plan)
    host = 2 * sum(layer.parameter_bytes for layer in workload.layers)
    assert 8e9 < host < 16e9
    rich = tuple(replace(node, host_memory_bytes=host) for node in cluster.nodes)
    decision = lay_out(replace(cluster, nodes=rich), workload, length=LENGTH, evaluations=200)
    assert islands(decision.plan) == [{f"n{n}"} for n in range(4)]


def test_no_island_spans_two_cities_with_slow_lines_between_them() -> None:
    sizes = [2, 4, 3, 2, 5]
    cluster = cities(sizes, 1250e6, 50 * MEGABIT)
    even = even_workload(layers=12, micro_batches=64)
    layers = tuple(replace(layer, parameter_bytes=1e8) for layer in even.layers)
    workload = replace(even, layers=layers, sent_per_exchanged_byte=SPARSE)
    small = replace(
        cluster, nodes=tuple(replace(node, memory_bytes=3.2e9, host_memory_bytes=None) for node in cluster.nodes)
    )
    decision = lay_out(small, workload, length=LENGTH, evaluations=200)
    check(decision.plan, len(workload.layers), workload.micro_batches)
    city = dict(zip(cluster.ids, np.repeat(np.arange(len(sizes)), sizes).tolist(), strict=True))
    assert [len({city[node] for node in island}) for island in islands(decision.plan)] == [1] * len(
        decision.plan.islands
    )
    assert {*decision.plan.nodes} == {*cluster.ids}


@pytest.mark.soak
def test_of_64_nodes_in_ten_cities_each_island_is_a_citys() -> None:
    sizes = [4, 5, 6, 7, 8, 9, 7, 6, 6, 6]
    workload = replace(llama("7B", 256), sent_per_exchanged_byte=4.25 / 32, outer_bytes_per_parameter_byte=1.0)
    drawn = cities(sizes, 125e6, 100 * MEGABIT)
    cluster = replace(drawn, nodes=tuple(replace(node, host_memory_bytes=32e9) for node in drawn.nodes))
    found = islands(lay_out(cluster, workload, length=100, evaluations=200).plan)
    city = dict(zip(cluster.ids, np.repeat(np.arange(len(sizes)), sizes).tolist(), strict=True))
    assert len(found) >= 9
    assert all(len({city[node] for node in island}) == 1 for island in found)


@pytest.mark.soak
def test_islands_may_be_halves_of_cities() -> None:
    lines, length = cities([4] * 4, 1000 * MEGABIT, 100 * MEGABIT), 100
    workload = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32)
    found = islands(lay_out(lines, workload, length=length, evaluations=QUICK).plan)
    assert [len(island) for island in found] == [2] * 8
    assert all(len({int(node[1:]) // 4 for node in island}) == 1 for island in found)


@given(speed=st.floats(1e4, 1e9), seed=st.integers(0, 99))
def test_equal_nodes_are_looked_at_together_alone_and_in_groups_of_equal_size(speed: float, seed: int) -> None:
    """Whatever the noise of measurements."""
    measured = speed * np.random.default_rng(seed).uniform(0.95, 1.05, (8, 8))
    cluster = replace(uniform_cluster(8), bandwidth=measured)
    looked_at = {tuple(map(len, partition)) for partition in partitions(cluster, lambda nodes: True)}
    assert {(1,) * 8, (2,) * 4, (4,) * 2, (8,)} <= looked_at


def test_a_part_that_cannot_hold_the_model_joins_the_nearest() -> None:
    cluster = cities([2, 1, 2], 1e9, 1e6)
    bandwidth = cluster.bandwidth.copy()
    bandwidth[2, 3:] = bandwidth[3:, 2] = 2e6
    found = [*partitions(replace(cluster, bandwidth=bandwidth), lambda nodes: len(nodes) >= 2)]
    assert found[0] == ((0, 1, 2, 3, 4),)
    assert ((0, 1), (2, 3, 4)) in found
    assert all(len(part) >= 2 for partition in found for part in partition)


def test_an_exchange_takes_what_the_slowest_line_takes() -> None:
    cluster = uniform_cluster(3, bandwidth=1e8)
    slow = replace(cluster, nodes=(replace(cluster.nodes[0], up=1e7), *cluster.nodes[1:]))
    workload = even_workload(layers=2, micro_batches=6)
    plan = joined([Plan(0, (Stage((0, 2), (f"n{n}",), (2,), island=n),), ()) for n in range(3)], 0)
    size = 2 * 2e7
    assert exchange_seconds(cluster, workload, plan) == pytest.approx(2 * size * 2 / 3 / 1e8 + 2e-3)
    assert exchange_seconds(slow, workload, plan) == pytest.approx(2 * size * 2 / 3 / 1e7 + 2e-3)
    assert exchange_seconds(cluster, workload, joined(plan.islands[:1], 0)) == 0


def test_in_an_exchange_islands_of_one_machine_share_its_line_and_what_they_send_each_other_does_not_pass_it() -> None:
    cluster, workload = uniform_cluster(3, bandwidth=1e8), even_workload(layers=2, micro_batches=6)
    machine = [replace(node, line="m") for node in cluster.nodes[1:]]
    shared = replace(cluster, nodes=(cluster.nodes[0], *machine), lines=(Line("m", up=1e7, down=1e8),))
    plan = joined([Plan(0, (Stage((0, 2), (f"n{n}",), (2,), island=n),), ()) for n in range(3)], 0)
    each = 2 * (2 * 2e7) / 3  # bytes that one sends another
    assert exchange_seconds(shared, workload, plan) == pytest.approx(2 * each / 1e7 + 2e-3)
    two = joined(plan.islands[:2], 0)  # n2 is idle
    assert exchange_seconds(shared, workload, two) == pytest.approx(2 * 2e7 * 2 / 2 / 1e7 + 2e-3)


def test_what_is_exchanged_with_all_is_divided_among_the_replicas_of_an_island() -> None:
    """n0 sends all to two; n1 and n2 each a half to two, and get a half from each other and all from n0."""
    cluster = uniform_cluster(3, bandwidth=1e8)
    workload = replace(even_workload(layers=2, micro_batches=6), exchanged_with_all=True)
    alone = Plan(0, (Stage((0, 2), ("n0",), (2,), island=0),), ())
    pair = Plan(0, (Stage((0, 2), ("n1", "n2"), (2, 2), island=1),), ())
    assert exchange_seconds(cluster, workload, joined([alone, pair], 0)) == pytest.approx(2 * 2 * 2e7 / 1e8 + 2e-3)
    slow = replace(cluster, nodes=(cluster.nodes[0], replace(cluster.nodes[1], up=1e7), cluster.nodes[2]))
    assert exchange_seconds(slow, workload, joined([alone, pair], 0)) == pytest.approx(2 * 2e7 / 1e7 + 2e-3)


@pytest.mark.parametrize(("length", "times"), [(10, 0.91), (30, 1.16)])
def test_islands_that_exchange_their_largest_changes_alone_need_fewer_tokens_if_often_and_more_if_seldom(
    length: int, times: float
) -> None:
    workload, sparse = llama("1.1B"), replace(llama("1.1B"), exchanged_with_all=True)
    assert tokens_needed(1, sparse, length) == 1
    ratio = tokens_needed(8, sparse, length) / tokens_needed(8, workload, length)
    assert ratio == pytest.approx(times, abs=0.01)


LARGE = cities([2, 1, 2], 1250e6, 50 * MEGABIT)
#: Where n2 can hold the model alone, and the others two by two.
CITIES = replace(
    LARGE,
    nodes=tuple(
        node if node.id == "n2" else replace(node, memory_bytes=3.2e8, host_memory_bytes=None) for node in LARGE.nodes
    ),
)
WORKLOAD = replace(even_workload(layers=4, micro_batches=24), sent_per_exchanged_byte=SPARSE)
PLAN = lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=200).plan


def test_what_is_planned_here_are_three_islands() -> None:
    assert islands(PLAN) == [{"n0", "n1"}, {"n2"}, {"n3", "n4"}]


@settings(max_examples=30, deadline=None)
@given(gone=st.sets(st.integers(0, 4), max_size=4))
def test_what_is_left_of_the_islands_computes_every_micro_batch_once(gone: set[int]) -> None:
    plan = PLAN
    left = CITIES.only([n for n in range(5) if n not in gone])
    after = carried_on(plan, left, WORKLOAD)
    survivors = [island for island in plan.islands if {*island.nodes} <= {*left.ids}]
    if after is None:
        assert not survivors
        return
    check(after, 4, 24)
    assert {*after.nodes, *after.idle} == {*left.ids}
    assert {island.stages[0].island for island in survivors} <= {stage.island for stage in after.stages}
    if len(after.islands) == len(plan.islands):
        before, now = chains(plan), chains(after)
        assert all(one == other for one, other in zip(before, now, strict=True) if {*one} <= {*left.ids})


def test_if_the_batch_grows_a_step_has_as_many_batches_as_islands_and_costs_as_many_steps() -> None:
    decision = lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=QUICK, batches=None)
    plan, problem = decision.plan, Problem(CITIES, WORKLOAD)
    assert len(plan.islands) > 1
    assert f"Each step has {len(plan.islands)} batches." in decision.sentence
    assert plan.micro_batches == 24 * len(plan.islands)
    step, exchange = decision.predicted.iteration_seconds, decision.predicted.exchange_seconds
    each = (step + exchange / LENGTH) * tokens_needed(len(plan.islands), WORKLOAD, LENGTH)
    assert price_of_layout(problem, plan, Terms(LENGTH)).compared == pytest.approx(each / len(plan.islands))
    shared = lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=QUICK).predicted.iteration_seconds
    assert step > 2 * shared


def test_what_is_left_of_a_grown_batchs_islands_keeps_its_samples_until_the_next_plan() -> None:
    laid_out = lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=QUICK, batches=None).plan
    batches = len(laid_out.islands)
    laid_out = replace(laid_out, rounds=spread(LENGTH, 900, batches_each=batches))
    left = CITIES.only(
        [n for n in range(5) if n not in {CITIES.ids.index(node) for node in laid_out.islands[-1].nodes}]
    )
    after = carried_on(laid_out, left, WORKLOAD)
    assert after is not None
    check(after, 4, 24)
    assert (len(after.islands), after.micro_batches) == (batches - 1, batches * 24)
    kept = lay_out(left, WORKLOAD, after, length=LENGTH, evaluations=QUICK, batches=batches)
    assert kept.plan.micro_batches == batches * 24
    found = lay_out(left, WORKLOAD, after, length=LENGTH, evaluations=QUICK, batches=None)
    assert (found.reason, found.plan.micro_batches) == (Reason.REQUESTED, 24 * len(found.plan.islands))


@pytest.mark.parametrize(
    ("apart", "given_up"), [([(1, 2)], {"n2"}), ([(0, 2), (2, 4)], {"n2"}), ([(0, 3)], {"n3", "n4"})]
)
def test_of_islands_that_cannot_reach_each_other_the_one_that_does_least_is_given_up(
    apart: list[tuple[int, int]], given_up: set[str]
) -> None:
    bandwidth = CITIES.bandwidth.copy()
    for one, other in apart:
        bandwidth[one, other] = 0.0
    after = carried_on(PLAN, replace(CITIES, bandwidth=bandwidth), WORKLOAD)
    assert after is not None
    assert {*after.idle} == given_up
    check(after, 4, 24)


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_an_island_goes_on_without_the_later_of_two_replicas_that_no_longer_reach_each_other(order: str) -> None:
    """Only they have its state."""
    stages = [Stage((0, 4), ("a",), (), island=0), Stage((0, 4), ("b", "c"), (), island=1)]
    alone = from_routes(0, stages[:1], [(("a",), 12)])
    plan = joined([alone, from_routes(0, stages[1:], [(("b",), 6), (("c",), 6)])], 0)
    cluster = cities([3], 1250e6, 1250e6)
    bandwidth = cluster.bandwidth.copy()
    one, other = sorted(map(order.index, "bc"))
    bandwidth[one, other] = bandwidth[other, one] = 0.0
    nodes = tuple(replace(node, id=name) for node, name in zip(cluster.nodes, order, strict=True))
    after = carried_on(plan, replace(cluster, nodes=nodes, bandwidth=bandwidth), WORKLOAD)
    assert after is not None
    assert islands(after) == [{"a"}, {order[one]}]
    assert after.idle == (order[other],)
    check(after, 4, 24)


def test_what_cannot_reach_any_other_leaves_one_island() -> None:
    apart = np.isclose(CITIES.bandwidth, LARGE.bandwidth.min())
    after = carried_on(PLAN, replace(CITIES, bandwidth=np.where(apart, 0.0, CITIES.bandwidth)), WORKLOAD)
    assert after is not None
    assert len(after.islands) == 1


def test_islands_that_there_are_stay_unless_others_are_much_faster() -> None:
    """After a coordinator's restart there is no plan to compare with."""
    pairs = {f"n{n}": n % 4 for n in range(8)}
    cluster = cities([8], 1250e6, 1250e6)
    workload = replace(llama("1.1B", 256), sent_per_exchanged_byte=SPARSE)
    for known, count in (({}, 1), ({f"n{n}": n // 4 for n in range(8)}, 2), (pairs, 1)):
        found = lay_out(cluster, workload, length=LENGTH, numbers=known, evaluations=QUICK)
        assert len(found.plan.islands) == count


def test_what_is_left_of_one_does_not_keep_the_others_from_staying() -> None:
    fast = cities([9], 1250e6, 1250e6)
    small = replace(fast.nodes[8], memory_bytes=1e9, host_memory_bytes=1e9)
    workload = replace(llama("1.1B", 512), sent_per_exchanged_byte=SPARSE)
    known = {f"n{n}": n // 4 for n in range(9)}
    cluster = replace(fast, nodes=(*fast.nodes[:8], small))
    assert len(lay_out(cluster, workload, length=LENGTH, numbers=known, evaluations=QUICK).plan.islands) == 2


def test_an_island_keeps_its_number_though_there_are_fewer_now() -> None:
    found = lay_out(CITIES.only([2]), WORKLOAD, length=LENGTH, numbers={"n2": 7}, evaluations=QUICK).plan
    assert found.island_of("n2") == 7


def member(*parts: set[str]) -> Member:
    return Member(tuple(Island((tuple(sorted(part)),), (0, 4)) for part in parts))


def test_nodes_that_a_member_does_not_know_join_the_island_that_is_nearest() -> None:
    assert with_newcomers(member({"n0"}, {"n2"}, {"n3"}), CITIES) == ((0, 1), (2,), (3, 4))


def test_an_island_whose_nodes_have_left_is_gone_and_nobody_left_makes_no_partition() -> None:
    left = CITIES.only([2, 3])
    assert with_newcomers(member({"n0", "n1"}, {"n2"}, {"n3", "n4"}), left) == ((0,), (1,))
    assert with_newcomers(member({"n0", "n1"}), left) == ()


def test_layouts_come_with_others_that_differ_from_them_the_one_that_was_chosen_first() -> None:
    found = lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=200)
    assert found.population[0] == Member.of(found.plan)
    assert len(set(found.population)) == len(found.population) > 1


def test_the_next_layout_begins_with_the_population() -> None:
    """Where there is time for one partition alone."""
    before = lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=200)
    cold, warm = (
        lay_out(CITIES, WORKLOAD, length=LENGTH, evaluations=QUICK, population=kept, time_used=lambda: 1.0).plan
        for kept in ((), before.population)
    )
    assert islands(cold) != islands(before.plan) == islands(warm)


def numbers(plan: Plan) -> dict[str, int]:
    return {node: stage.island for stage in plan.stages for node in stage.replicas}


def test_an_island_keeps_its_number_while_most_of_its_nodes_stay() -> None:
    known = numbers(PLAN)
    again = lay_out(CITIES.only([2, 3, 4]), WORKLOAD, PLAN, length=LENGTH, numbers=known, evaluations=200).plan
    assert {*again.nodes} == {"n2", "n3", "n4"}
    assert all(again.island_of(node) == PLAN.island_of(node) for node in again.nodes)
    back = lay_out(CITIES, WORKLOAD, again, length=LENGTH, numbers=numbers(again), evaluations=200).plan
    assert islands(back) == islands(PLAN)
    assert all(back.island_of(node) == again.island_of(node) for node in again.nodes)


def test_nobody_joins_who_would_keep_all_waiting_for_its_state_for_longer_than_it_helps() -> None:
    even = even_workload(layers=6, micro_batches=24)
    workload = replace(even, sent_per_exchanged_byte=SPARSE, outer_bytes_per_parameter_byte=1.0)
    large = cities([1, 3], 115e6, 2e6)
    small = [replace(node, memory_bytes=6.2e8, host_memory_bytes=None) for node in large.nodes[1:]]
    cluster = replace(large, nodes=(large.nodes[0], *small))
    known = lay_out(cluster.only([0, 1, 2]), workload, length=LENGTH, evaluations=200).plan
    for horizon, reason in ((50.0, Reason.FASTER), (5.0, Reason.KEPT)):
        decision = lay_out(
            cluster, workload, known, length=LENGTH, numbers=numbers(known), horizon=horizon, evaluations=200
        )
        assert decision.reason is reason
    assert decision.plan.idle == ("n3",)


def test_a_new_island_joins_at_once_as_its_nodes_copy_while_others_train() -> None:
    known = lay_out(CITIES.only([2, 3, 4]), WORKLOAD, length=LENGTH, evaluations=200).plan
    known = replace(known, rounds=spread(LENGTH, 1000))
    decision = lay_out(CITIES, WORKLOAD, known, length=LENGTH, numbers=numbers(known), horizon=10.0, evaluations=200)
    assert decision.reason is Reason.FASTER
    assert decision.plan.island_of("n0") == decision.plan.island_of("n1")
    assert decision.plan.island_of("n0") not in numbers(known).values()
