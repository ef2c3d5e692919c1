"""The placements of a plan's nodes fit together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import group_of, placement_of
from dtfm.protos.plan_pb2 import Plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    names = iter(f"n{i}" for i in range(sum(sizes)))
    stages = [
        Plan.Stage(first_layer=2 * i, past_last_layer=2 * i + 2, replicas=[next(names) for _ in range(size)])
        for i, size in enumerate(sizes)
    ]
    routes = [
        Plan.Route(
            nodes=[draw(st.sampled_from(list(s.replicas))) for s in stages], micro_batches=draw(st.integers(0, 4))
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return Plan(generation=3, stages=stages, routes=routes, idle=["spare"])


def test_an_idle_node_has_no_placement() -> None:
    stages = [Plan.Stage(first_layer=0, past_last_layer=1, replicas=["a"])]
    plan = Plan(stages=stages, routes=[Plan.Route(nodes=["a"], micro_batches=2)], idle=["b"])
    assert placement_of(plan, "b", 1) is None
    assert placement_of(plan, "a", 1) is not None


def test_the_plan_says_how_many_are_in_flight_by_default_two_per_stage_from_this_one_on() -> None:
    stages = [Plan.Stage(past_last_layer=1, replicas=["a"]), Plan.Stage(past_last_layer=2, replicas=["b"], in_flight=7)]
    plan = Plan(stages=stages, routes=[Plan.Route(nodes=["a", "b"], micro_batches=9)])
    assert [placement.in_flight for name in "ab" if (placement := placement_of(plan, name, 0))] == [4, 7]


@given(plans(), st.integers(0, 5))
def test_every_micro_batch_passes_every_stage_once_and_neighbours_agree(plan: Plan, held_out: int) -> None:
    placements = {n: placement_of(plan, n, held_out) for s in plan.stages for n in s.replicas}
    total = sum(r.micro_batches for r in plan.routes)
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
def test_each_bucket_is_written_into_a_checkpoint_by_one_node_that_holds_it(plan: Plan) -> None:
    layers = plan.stages[-1].past_last_layer
    specs = [BucketSpec(layer, (layer,), ()) for layer in range(layers)] + [BucketSpec(layers, (0, layers - 1), ())]
    placements = [placement_of(plan, n, 0, specs) for s in plan.stages for n in s.replicas]
    writers = [
        (index, placement.node)
        for placement in placements
        if placement is not None
        for index, group in placement.groups.items()
        if group.checkpoint_writer(index) == placement.node
    ]
    assert sorted(index for index, _ in writers) == [spec.index for spec in specs]


def test_a_tied_parameter_is_reduced_by_all_stages_that_use_it_and_counted_by_the_first() -> None:
    stages = [
        Plan.Stage(first_layer=0, past_last_layer=2, replicas=["a", "b"]),
        Plan.Stage(first_layer=2, past_last_layer=3, replicas=["c"]),
        Plan.Stage(first_layer=3, past_last_layer=5, replicas=["d", "e"]),
    ]
    group = group_of(Plan(stages=stages), (0, 4))
    assert group.members == ("a", "b", "d", "e")
    assert group.counted_by == ("a", "b")
    assert group_of(Plan(stages=stages), (2,)).members == ("c",)
