"""When nodes are gone, the others keep their work and take over that of the missing ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtfm.scheduler.model.plan import Plan, Route, Stage, validate
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.replan.failover import rerouted
from tests.scheduler.clusters import even_workload, uniform_cluster

LAYERS, MICRO_BATCHES = 12, 8
NOBODY = ((),) * LAYERS


def plan(*stages: tuple[str, ...], routes: tuple[tuple[tuple[str, ...], int], ...]) -> Plan:
    width = LAYERS // len(stages)
    return Plan(
        generation=1,
        stages=tuple(Stage((width * at, width * (at + 1)), nodes) for at, nodes in enumerate(stages)),
        routes=tuple(Route(nodes, count) for nodes, count in routes),
    )


TWO_BY_TWO = plan(("n0", "n1"), ("n2", "n3"), routes=((("n0", "n2"), 4), (("n1", "n3"), 4)))


def problem(*nodes: str, speeds: dict[str, float] | None = None, memory: float = 8e9) -> Problem:
    cluster = uniform_cluster(len(nodes), memory=memory)
    named = (
        replace(node, id=name, flops=(speeds or {}).get(name, 1e10))
        for node, name in zip(cluster.nodes, nodes, strict=True)
    )
    return Problem(replace(cluster, nodes=tuple(named)), even_workload(LAYERS, MICRO_BATCHES))


def chains(plan: Plan) -> list[tuple[str, ...]]:
    """By micro-batch."""
    return [route.nodes for route in plan.routes for _ in range(route.micro_batches)]


def test_without_a_loss_only_the_idle_nodes_change() -> None:
    again = rerouted(TWO_BY_TWO, problem("n0", "n1", "n2", "n3", "n4"), NOBODY)
    assert again == replace(TWO_BY_TWO, idle=("n4",))


def test_the_micro_batches_of_a_lost_node_go_to_the_replicas_that_finish_earliest() -> None:
    three = plan(("n0",), ("n1", "n2", "n3"), routes=((("n0", "n1"), 4), (("n0", "n2"), 2), (("n0", "n3"), 2)))
    new = rerouted(three, problem("n0", "n2", "n3", speeds={"n3": 2e10}), NOBODY)
    assert new is not None
    assert new.routes == (
        Route(("n0", "n3"), 3),
        Route(("n0", "n2"), 3),
        Route(("n0", "n3"), 2),
    )


def test_an_idle_node_replaces_a_lost_one_only_if_it_holds_the_state() -> None:
    present = problem("n0", "n1", "n3", "n4", "n5")
    new = rerouted(TWO_BY_TWO, present, (*[()] * 6, *[("n5",)] * 6))
    assert new is not None
    assert new.routes == (Route(("n0", "n5"), 4), Route(("n1", "n3"), 4))
    assert new.idle == ("n4",)
    assert rerouted(TWO_BY_TWO, problem("n0", "n1", "n4"), NOBODY) is None


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
def test_survivors_keep_the_numbers_of_their_micro_batches(data: st.DataObject, sizes: list[int], spares: int) -> None:
    borders = np.cumsum([0, *sizes])
    stages = tuple(tuple(f"n{i}" for i in range(a, b)) for a, b in pairwise(borders))
    chain = st.tuples(*(st.sampled_from(stage) for stage in stages))
    drawn = data.draw(st.lists(chain, min_size=MICRO_BATCHES, max_size=MICRO_BATCHES))
    old = plan(*stages, routes=tuple((nodes, 1) for nodes in drawn))
    everybody = [f"n{i}" for i in range(borders[-1] + spares)]
    gone = data.draw(st.sets(st.sampled_from(everybody), max_size=len(everybody) - 1))
    holders = [data.draw(st.sets(st.sampled_from(everybody))) for _ in stages]
    width = LAYERS // len(stages)
    per_layer = [holders[layer // width] for layer in range(width * len(stages))]
    present = problem(*(node for node in everybody if node not in gone))
    workload = even_workload(width * len(stages), MICRO_BATCHES)
    new = rerouted(old, Problem(present.cluster, workload), per_layer)
    if new is None:
        assert any(gone >= set(stage) for stage in stages)
        return
    validate(new, present.cluster.ids, workload)
    for before, after in zip(chains(old), chains(new), strict=True):
        for node, successor, stage, able in zip(before, after, new.stages, holders, strict=True):
            assert successor == node or node in gone
            assert successor in stage.replicas
            assert successor in old.nodes or successor in able
