"""The placements of a plan's nodes fit together."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, strategies as st

from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import group_of, placement_of
from dtfm.scheduler.model.plan import Plan, Stage, Takeover, from_routes


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    names = iter(f"n{i}" for i in range(sum(sizes)))
    stages = [Stage((2 * i, 2 * i + 2), tuple(next(names) for _ in range(size)), ()) for i, size in enumerate(sizes)]
    route = st.tuples(st.tuples(*(st.sampled_from(s.replicas) for s in stages)), st.integers(1, 4))
    plan = from_routes(3, stages, draw(st.lists(route, min_size=1, max_size=4)), ("spare",))
    if sizes[0] > 1 and draw(st.booleans()):
        return without_first(plan)
    return plan


def without_first(plan: Plan) -> Plan:
    """The first replica of the first stage is lost, and the next one does its work."""
    stage = plan.stages[0]
    (gone, heir, *others), (count, had, *loads) = stage.replicas, stage.loads
    left = replace(stage, replicas=(heir, *others), loads=(count + had, *loads))
    takeover = Takeover(0, gone, 0, ((heir, count),) if count else ())
    return replace(plan, stages=(left, *plan.stages[1:]), takeovers=(takeover,))


def test_an_idle_node_has_no_placement() -> None:
    plan = Plan(1, (Stage((0, 1), ("a",), (2,)),), (), ("b",))
    assert placement_of(plan, "b", 1) is None
    assert placement_of(plan, "a", 1) is not None


def test_the_plan_says_how_many_are_in_flight_by_default_two_per_stage_from_this_one_on() -> None:
    plan = from_routes(1, [Stage((0, 1), ("a",), ()), Stage((1, 2), ("b",), (), (7,))], [(("a", "b"), 9)])
    assert [placement.in_flight for name in "ab" if (placement := placement_of(plan, name, 0))] == [4, 7]


@given(plans(), st.integers(0, 5))
def test_every_micro_batch_passes_every_stage_once_and_neighbours_agree(plan: Plan, held_out: int) -> None:
    placements = {n: placement_of(plan, n, held_out) for s in plan.stages for n in s.replicas}
    total = sum(plan.stages[0].loads)
    for stage in range(len(plan.stages)):
        here = [s for s in placements.values() if s is not None and s.stage == stage]
        assert sorted(m for s in here for m in s.micro_batches) == list(range(total))
        assert sorted(m for s in here for m in s.evaluation_micro_batches) == list(range(held_out))
    for node, placement in placements.items():
        assert placement is not None
        assert set(placement.next) == (set() if placement.last else set(placement.micro_batches))
        for number, following in placement.next.items():
            then = placements[following]
            assert then is not None
            assert then.previous[number] == node
        for number, following in placement.evaluation_next.items():
            then = placements[following]
            assert then is not None
            assert then.evaluation_previous[number] == node


@given(plans())
def test_the_members_of_a_buckets_group_are_the_nodes_that_hold_it(plan: Plan) -> None:
    layers = plan.stages[-1].layers[1]
    specs = [BucketSpec(layer, (layer,), ()) for layer in range(layers)] + [BucketSpec(layers, (0, layers - 1), ())]
    placements = [placement_of(plan, n, 0, specs) for s in plan.stages for n in s.replicas]
    for spec in specs:
        holders = {p.node: p.groups[spec.index] for p in placements if p is not None and spec.index in p.groups}
        assert holders
        assert all(group.members == tuple(holders) for group in holders.values())


def test_a_tied_parameter_is_reduced_by_all_stages_that_use_it_and_counted_by_the_first() -> None:
    stages = (Stage((0, 2), ("a", "b"), ()), Stage((2, 3), ("c",), ()), Stage((3, 5), ("d", "e"), ()))
    plan = Plan(1, stages, ())
    group = group_of(plan, (0, 4))
    assert group.members == ("a", "b", "d", "e")
    assert group.counted_by == ("a", "b")
    assert group_of(plan, (2,)).members == ("c",)
