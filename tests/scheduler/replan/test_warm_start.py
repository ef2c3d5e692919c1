"""Where replanning starts."""

from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.replan.warm_start import NEWCOMERS, repaired
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
