"""Which islands of free nodes begin within a round."""

from __future__ import annotations

from dataclasses import replace

from dtfm.scheduler.islands.layout import carried_on, lay_out
from dtfm.scheduler.islands.within_round import Grown, grown
from dtfm.scheduler.model.plan import Plan, check
from dtfm.scheduler.model.rounds import Rounds, spread
from dtfm.scheduler.model.workload import Workload
from tests.scheduler.clusters import even_workload
from tests.scheduler.islands.test_layout import CITIES, LENGTH, MEGABIT, PLAN, SPARSE, cities, islands, numbers

SMALL = replace(even_workload(layers=4, micro_batches=24), sent_per_exchanged_byte=SPARSE)


def scaled(workload: Workload, times: float) -> Workload:
    """With layers that take this many times as long."""
    return replace(
        workload,
        layers=tuple(replace(layer, forward_flops=times * layer.forward_flops) for layer in workload.layers),
    )


SLOWLY = scaled(SMALL, 50)


def three_alone(rounds: Rounds | None = None) -> Plan:
    """n0, n1 and n2 are islands of their own; n3 is not there."""
    lines = cities([1] * 4, 20 * MEGABIT, 20 * MEGABIT)
    plan = lay_out(lines.only([0, 1, 2]), SLOWLY, length=LENGTH, evaluations=50).plan
    assert islands(plan) == [{"n0"}, {"n1"}, {"n2"}]
    return replace(plan, rounds=rounds or spread(LENGTH, 1000))


def begun(incumbent: Plan, steps_left: int = 20, speed: float = 1250e6, nodes: int = 4) -> Grown | None:
    lines = cities([1] * 4, speed, speed).only(range(nodes))
    return grown(lines, SLOWLY, incumbent, length=LENGTH, steps_left=steps_left)


def test_a_node_that_joins_begins_as_an_island_and_the_others_stay_as_they_are() -> None:
    incumbent = three_alone()
    found = begun(incumbent)
    assert found is not None
    assert found.with_moments
    plan = found.decision.plan
    check(plan, 4, 24)
    assert (plan.idle, plan.rounds) == ((), incumbent.rounds)
    assert numbers(plan) == {**numbers(incumbent), "n3": 3}
    assert [stage.layers for stage in plan.stages[:3]] == [stage.layers for stage in incumbent.stages]
    assert [sum(stage.loads) for stage in plan.stages] == [6] * 4


def test_where_moments_take_longer_than_it_helps_its_moments_are_zero() -> None:
    """As they would be if it waited for the exchange."""
    for steps, speed, with_moments in ((3, 5 * MEGABIT, False), (29, 100 * MEGABIT, True)):
        found = begun(three_alone(), steps, speed)
        assert found is not None
        assert found.with_moments == with_moments


def test_where_moments_are_zero_at_the_beginning_of_each_round_nobody_waits_for_them() -> None:
    found = begun(three_alone(replace(spread(LENGTH, 1000), restarts=True)))
    assert found is not None
    assert not found.with_moments


def test_without_free_nodes_or_steps_or_with_a_node_of_the_plan_gone_nothing_begins() -> None:
    assert begun(three_alone(), nodes=3) is None
    assert begun(three_alone(), nodes=2) is None
    assert begun(three_alone(), steps_left=0) is None


def test_who_is_left_of_an_island_begins_again_with_another_node_and_alone_waits_if_it_cannot_hold_the_model() -> None:
    """n3 and n4 hold the model together. n4 was lost and is back, or another node is there in its place."""
    incumbent = replace(PLAN, rounds=spread(LENGTH, 1000))
    workload = scaled(replace(even_workload(layers=4, micro_batches=24), sent_per_exchanged_byte=SPARSE), 50)
    left = carried_on(incumbent, CITIES.only([0, 1, 2, 3]), workload)
    assert left is not None
    assert left.idle == ("n3",)
    assert grown(CITIES.only([0, 1, 2, 3]), workload, left, length=LENGTH, steps_left=25) is None
    found = grown(CITIES, workload, left, length=LENGTH, steps_left=25)
    assert found is not None
    plan = found.decision.plan
    check(plan, 4, 24)
    assert islands(plan) == islands(PLAN)
    assert {numbers(plan)[node] for node in ("n3", "n4")} == {1 + max(numbers(left).values())}
