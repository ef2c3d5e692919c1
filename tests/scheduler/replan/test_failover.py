"""When nodes are gone, the others keep their work and take over the missing nodes' work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.memory import Checkpointing, Keeping, in_flight
from dtfm.scheduler.model.plan import Plan, Stage, Takeover, from_routes, validate
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.replan.failover import rerouted
from tests.scheduler.clusters import even_workload, uniform_cluster

LAYERS, MICRO_BATCHES = 12, 8
NOBODY = ((),) * LAYERS


def plan(*stages: tuple[str, ...], routes: tuple[tuple[tuple[str, ...], int], ...]) -> Plan:
    width = LAYERS // len(stages)
    return from_routes(1, [Stage((width * at, width * (at + 1)), nodes, ()) for at, nodes in enumerate(stages)], routes)


TWO_BY_TWO = plan(("n0", "n1"), ("n2", "n3"), routes=((("n0", "n2"), 4), (("n1", "n3"), 4)))


def problem(*nodes: str, speeds: dict[str, float] | None = None, memory: float = 8e9) -> Problem:
    cluster = uniform_cluster(len(nodes), memory=memory)
    named = (
        replace(node, id=name, flops=(speeds or {}).get(name, 1e10))
        for node, name in zip(cluster.nodes, nodes, strict=True)
    )
    return Problem(replace(cluster, nodes=tuple(named)), even_workload(LAYERS, MICRO_BATCHES))


def test_without_a_loss_only_the_idle_nodes_change() -> None:
    again = rerouted(TWO_BY_TWO, problem("n0", "n1", "n2", "n3", "n4"), NOBODY)
    assert again == replace(TWO_BY_TWO, idle=("n4",))


def test_the_micro_batches_of_a_lost_node_go_to_the_replicas_that_finish_earliest() -> None:
    three = plan(("n0",), ("n1", "n2", "n3"), routes=((("n0", "n1"), 4), (("n0", "n2"), 2), (("n0", "n3"), 2)))
    new = rerouted(three, problem("n0", "n2", "n3", speeds={"n3": 2e10}), NOBODY)
    assert new is not None
    assert new.stages[1].loads == (3, 5)
    assert new.takeovers == (Takeover(1, "n1", 0, (("n2", 1), ("n3", 3))),)
    assert new.flows == three.flows
    assert [flows.tolist() for flows in draft_of(new, problem("n0", "n2", "n3").cluster).flows] == [[[3, 5]]]


def test_others_keep_their_numbers_in_flight_and_a_newcomer_gets_the_least() -> None:
    held = tuple(replace(stage, in_flight=(9, 7)) for stage in TWO_BY_TWO.stages)
    before = replace(TWO_BY_TWO, stages=held)
    taken_over = rerouted(before, problem("n1", "n2", "n3"), NOBODY)
    assert taken_over is not None
    assert [stage.in_flight for stage in taken_over.stages] == [(7,), (9, 7)]
    replaced = rerouted(before, problem("n1", "n2", "n3", "n4"), (("n4",),) * LAYERS)
    assert replaced is not None
    assert (replaced.stages[0].replicas, replaced.stages[0].in_flight) == (("n4", "n1"), (in_flight(0, 2), 7))


def test_heirs_keep_what_they_need_as_before_and_a_newcomer_as_a_new_plan_would_have_it() -> None:
    by_layer = Keeping(Checkpointing.LAYER)
    before = replace(
        TWO_BY_TWO, stages=(replace(TWO_BY_TWO.stages[0], keeping=(Keeping(), by_layer)), TWO_BY_TWO.stages[1])
    )
    taken_over = rerouted(before, problem("n1", "n2", "n3"), NOBODY)
    assert taken_over is not None
    assert [stage.keeping for stage in taken_over.stages] == [(by_layer,), ()]
    usual = rerouted(before, problem("n0", "n2", "n3"), NOBODY)
    assert usual is not None
    assert usual.stages[0].keeping == ()
    # 480 MB of state, and 6 x 16 MB that layers keep, or 6 x 1 MB of inputs and 16 MB.
    for memory, own in ((7e8, Keeping()), (5.5e8, by_layer)):
        some = problem("n0", "n1", "n3", "n4")
        *others, n4 = some.cluster.nodes
        cluster = replace(some.cluster, nodes=(*others, replace(n4, memory_bytes=memory)))
        auto = Problem(cluster, replace(some.workload, checkpointing=None))
        replaced = rerouted(before, auto, (("n4",),) * LAYERS)
        assert replaced is not None
        assert (replaced.stages[1].replicas, replaced.stages[1].keeping) == (
            ("n4", "n3"),
            () if own == Keeping() else (own, Keeping()),
        )


def test_a_plan_cannot_go_on_if_the_remaining_nodes_have_no_room_in_its_ways() -> None:
    some = problem("n1", "n2", "n3", memory=5.5e8)
    auto = Problem(some.cluster, replace(some.workload, checkpointing=None))
    assert rerouted(TWO_BY_TWO, auto, NOBODY) is None
    by_layer = tuple(replace(stage, keeping=(Keeping(Checkpointing.LAYER),) * 2) for stage in TWO_BY_TWO.stages)
    assert rerouted(replace(TWO_BY_TWO, stages=by_layer), auto, NOBODY) is not None


def test_heirs_that_are_lost_in_turn_hand_on_all_that_they_had_and_are_replaced_as_others_are() -> None:
    three = plan(("n0",), ("n1", "n2", "n3"), routes=((("n0", "n1"), 4), (("n0", "n2"), 2), (("n0", "n3"), 2)))
    once = rerouted(three, problem("n0", "n2", "n3"), NOBODY)
    assert once is not None
    assert once.stages[1].loads == (4, 4)
    replaced = rerouted(once, problem("n0", "n3", "n4"), (("n4",),) * LAYERS)
    assert replaced is not None
    assert micro_batches_of(replaced)["n4"] == micro_batches_of(once)["n2"]
    assert micro_batches_of(replaced)["n3"] == micro_batches_of(once)["n3"]
    twice = rerouted(replaced, problem("n0", "n3"), NOBODY)
    assert twice is not None
    assert twice.takeovers[1] == Takeover(1, "n4", 0, (("n3", 4),))
    assert micro_batches_of(twice)["n3"] == tuple(range(8))


def test_an_idle_node_replaces_a_lost_one_only_if_it_holds_the_state() -> None:
    present = problem("n0", "n1", "n3", "n4", "n5")
    new = rerouted(TWO_BY_TWO, present, (*[()] * 6, *[("n5",)] * 6))
    assert new is not None
    assert new.takeovers == ()
    assert set(chains(new)) == {("n0", "n5"), ("n1", "n3")}
    assert new.idle == ("n4",)
    assert rerouted(TWO_BY_TWO, problem("n0", "n1", "n4"), NOBODY) is None


def test_a_holder_without_room_to_train_is_passed_over() -> None:
    present = problem("n0", "n1", "n3", "n4", "n5", speeds={"n4": 3e10})
    small = [replace(node, memory_bytes=1e8) if node.id == "n4" else node for node in present.cluster.nodes]
    present = Problem(replace(present.cluster, nodes=tuple(small)), present.workload)
    by_another = rerouted(TWO_BY_TWO, present, (("n4", "n5"),) * LAYERS)
    assert by_another is not None
    assert by_another.stages[1].replicas == ("n5", "n3")
    by_a_replica = rerouted(TWO_BY_TWO, present, (("n4",),) * LAYERS)
    assert by_a_replica is not None
    assert (by_a_replica.stages[1].replicas, by_a_replica.idle) == (("n3",), ("n4", "n5"))


def test_a_node_that_was_lost_and_is_back_gets_no_second_seat_in_its_stage() -> None:
    everybody_holds = (("n0", "n1", "n2", "n3"),) * LAYERS
    three = plan(("n0",), ("n1", "n2", "n3"), routes=((("n0", "n1"), 4), (("n0", "n2"), 2), (("n0", "n3"), 2)))
    once = rerouted(three, problem("n0", "n2", "n3"), everybody_holds)
    assert once is not None
    twice = rerouted(once, problem("n0", "n1", "n3"), everybody_holds)
    assert twice is not None
    assert (twice.stages[1].replicas, twice.idle) == (("n3",), ("n1",))
    other = rerouted(once, problem("n1", "n2", "n3"), everybody_holds)  # of the other stage it can
    assert other is not None
    assert other.stages[0].replicas == ("n1",)


def test_there_is_no_failover_when_a_link_or_memory_is_missing() -> None:
    present = problem("n0", "n1", "n2")
    unreachable = present.cluster.bandwidth.copy()
    unreachable[1, 2] = 0.0
    assert rerouted(TWO_BY_TWO, present, NOBODY) is not None
    assert (
        rerouted(TWO_BY_TWO, Problem(replace(present.cluster, bandwidth=unreachable), present.workload), NOBODY) is None
    )
    assert rerouted(TWO_BY_TWO, problem("n0", "n1", "n2", memory=1e8), NOBODY) is None


@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), spares=st.integers(0, 3))
def test_through_any_deaths_every_micro_batch_passes_each_stage_once_and_survivors_keep_theirs(
    data: st.DataObject, sizes: list[int], spares: int
) -> None:
    borders = np.cumsum([0, *sizes])
    stages = tuple(tuple(f"n{i}" for i in range(a, b)) for a, b in pairwise(borders))
    chain = st.tuples(*(st.sampled_from(stage) for stage in stages))
    drawn = data.draw(st.lists(chain, min_size=MICRO_BATCHES, max_size=MICRO_BATCHES))
    now = plan(*stages, routes=tuple((nodes, 1) for nodes in drawn))
    everybody = [f"n{i}" for i in range(borders[-1] + spares)]
    width = LAYERS // len(stages)
    workload = even_workload(width * len(stages), MICRO_BATCHES)
    for _ in range(data.draw(st.integers(1, 4))):
        # Whoever was lost may be back, idle.
        present = sorted(data.draw(st.sets(st.sampled_from(everybody), min_size=1)), key=everybody.index)
        holders = [data.draw(st.sets(st.sampled_from(everybody))) for _ in stages]
        per_layer = [holders[layer // width] for layer in range(width * len(stages))]
        cluster = problem(*present).cluster
        new = rerouted(now, Problem(cluster, workload), per_layer)
        if new is None:
            assert any(not set(stage.replicas) & set(present) for stage in now.stages)
            return
        validate(new, cluster.ids, workload)
        for before, after in zip(chains(now), chains(new), strict=True):
            for node, successor, stage, able in zip(before, after, new.stages, holders, strict=True):
                assert successor == node or node not in present
                assert successor in stage.replicas
                assert successor in now.nodes or successor in able
        for node, numbers in micro_batches_of(now).items():
            assert node not in present or set(numbers) <= set(micro_batches_of(new)[node])
        loads = {node: load for stage in new.stages for node, load in zip(stage.replicas, stage.loads, strict=True)}
        assert {node: len(numbers) for node, numbers in micro_batches_of(new).items()} == loads
        now = new
