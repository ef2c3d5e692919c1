"""Where replanning starts."""

import pytest

from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from dtfm.scheduler.model.population import Island, Member
from dtfm.scheduler.model.problem import Groups, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.replan.warm_start import NEWCOMERS, adapted, repaired
from tests.scheduler.clusters import even_workload, uniform_cluster


def plan(*stages: tuple[str, ...]) -> Plan:
    width = 12 // len(stages)
    return from_routes(
        1,
        [Stage((width * at, width * (at + 1)), nodes, ()) for at, nodes in enumerate(stages)],
        [([nodes[0] for nodes in stages], 8)],
    )


def starts(nodes: int, *stages: tuple[str, ...]) -> list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...] | None]]:
    return list(repaired(plan(*stages), Problem(uniform_cluster(nodes), even_workload(layers=12))))


def test_a_newcomer_is_tried_in_every_stage_while_others_stay() -> None:
    assert starts(4, ("n0", "n1"), ("n2",)) == [
        (((0, 1), (2,)), (0, 6, 12)),
        (((0, 1, 3), (2,)), (0, 6, 12)),
        (((0, 1), (2, 3)), (0, 6, 12)),
        (((0, 1), (2,)), None),
    ]


def test_only_some_of_many_newcomers_are_tried() -> None:
    assert len(starts(40, ("n0",), ("n1",))) == 1 + 2 * NEWCOMERS + 1


def test_a_lost_replicas_stage_stays_with_the_other_replicas() -> None:
    assert starts(3, ("n0", "gone"), ("n1", "n2"))[0] == (((0,), (1, 2)), (0, 6, 12))


def test_a_stage_without_replicas_goes_to_an_idle_node_or_another_stages_node_or_is_divided() -> None:
    assert starts(3, ("gone",), ("n0", "n1")) == [
        (((2,), (0, 1)), (0, 6, 12)),
        (((0,), (1,)), (0, 6, 12)),
        (((0, 1),), None),
    ]


def test_two_empty_stages_are_divided_among_the_rest_and_a_plan_without_survivors_gives_nothing() -> None:
    assert starts(1, ("gone",), ("n0",), ("lost",)) == [(((0,),), None)]
    assert starts(2, ("gone",), ("lost",)) == []


def test_the_cuts_of_a_model_of_another_length_are_not_reused() -> None:
    problem = Problem(uniform_cluster(3), even_workload(layers=5))
    assert list(repaired(plan(("n0", "n1"), ("n2",)), problem)) == [(((0, 1), (2,)), None)]


def member(*stages: tuple[str, ...]) -> Member:
    width = 12 // len(stages)
    return Member((Island(stages, tuple(range(0, 13, width))),))


def adapted_to(
    nodes: int, *members: Member, shape: Shape | None = None, late: bool = False
) -> list[tuple[Groups, tuple[int, ...] | None]]:
    problem = Problem(uniform_cluster(nodes), even_workload(layers=12, micro_batches=60))
    evaluator = Evaluator(problem, keep_idle_hands=False)
    return list(adapted(members, evaluator, shape or Shape(most_stages=12), lambda: late))


def test_a_member_stays_as_it_is_where_nobody_left_or_joined() -> None:
    assert adapted_to(3, member(("n0", "n1"), ("n2",)))[0][0] == ((0, 1), (2,))


def test_a_newcomer_joins_each_member_where_it_pays_most() -> None:
    both = adapted_to(4, member(("n0", "n1"), ("n2",)), member(("n0",), ("n1", "n2")))
    assert [groups for groups, _ in both] == [((0, 1), (2, 3)), ((0, 3), (1, 2))]


def test_a_node_that_is_idle_in_some_member_is_no_newcomer() -> None:
    (first, _), (second, _) = adapted_to(4, member(("n0", "n1"), ("n2",)), member(("n0", "n3"), ("n1", "n2")))
    assert (first, second) == (((0, 1), (2,)), ((0, 3), (1, 2)))


def test_a_lost_node_is_taken_out_of_each_member_and_the_others_stay() -> None:
    both = adapted_to(3, member(("n0", "gone"), ("n1", "n2")), member(("n0", "n1"), ("gone", "n2")))
    assert [groups for groups, _ in both] == [((0,), (1, 2)), ((0, 1), (2,))]


@pytest.mark.parametrize(
    ("nodes", "stages", "expected"),
    [
        (4, (("gone",), ("n0", "n1"), ("n2",)), [((3,), (0, 1), (2,))]),  # to the node that was idle
        (2, (("n0",), ("gone",), ("n1",)), [((0,), (1,))]),  # its layers go to its neighbours
        (1, (("lost",), ("gone",), ("n0",)), [((0,),)]),
    ],
)
def test_an_empty_stage_gets_a_node_or_loses_its_layers(
    nodes: int, stages: tuple[tuple[str, ...], ...], expected: list[Groups]
) -> None:
    known = Member((Island((("n0", "n1", "n2", "n3"),), (0, 12)),))  # so that nobody is a newcomer
    groups, cuts = adapted_to(nodes, member(*stages), known)[0]
    assert groups in expected
    assert cuts is not None
    assert (cuts[0], cuts[-1], len(cuts)) == (0, 12, len(groups) + 1)


def test_where_the_number_of_stages_is_requested_a_larger_stage_gives_a_node() -> None:
    start = adapted_to(4, member(("gone",), ("n0", "n1"), ("n2", "n3")), shape=Shape(stages=3, most_stages=3))[0]
    assert start[0] in (((1,), (0,), (2, 3)), ((3,), (0, 1), (2,)))


def test_requested_sizes_are_filled_up_from_idle_nodes_or_the_member_is_passed_over() -> None:
    shape = Shape(stages=2, sizes=(2, 1), most_stages=2)
    assert [groups for groups, _ in adapted_to(3, member(("n0", "gone"), ("n1",)), shape=shape)] == [((0, 2), (1,))]
    assert adapted_to(2, member(("n0", "gone"), ("n1",)), shape=shape) == []
    assert adapted_to(4, member(("n0",), ("n1",), ("n2",)), shape=shape) == []


def test_where_time_is_up_one_member_is_adapted() -> None:
    assert len(adapted_to(3, member(("n0", "n1"), ("n2",)), member(("n0",), ("n1", "n2")), late=True)) == 1


def test_groups_of_a_model_of_another_length_get_new_cuts_and_several_islands_do_not_count() -> None:
    island = Island((("n0", "gone"), ("gone",), ("n2",)), (0, 2, 4, 7))
    assert adapted_to(3, Member((island,)), Member((island, island))) == [(((0,), (2,)), None)]
