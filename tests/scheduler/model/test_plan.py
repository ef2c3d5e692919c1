"""What makes a plan valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover, check, from_routes, validate
from tests.scheduler.clusters import even_workload

PLAN = Plan(
    1,
    (Stage((0, 2), ("a", "b"), (3, 5)), Stage((2, 3), ("c", "d"), (8, 0))),
    ((Flow("a", "c", 3), Flow("b", "c", 5)),),
    ("e",),
)
LOST = replace(
    PLAN,
    stages=(Stage((0, 2), ("b",), (8,)), PLAN.stages[1]),
    takeovers=(Takeover(0, "a", 0, (("b", 3),)),),
)
NAMES = tuple("abcde")


def test_routes_become_loads_and_flows() -> None:
    stages = [replace(stage, loads=()) for stage in PLAN.stages]
    assert from_routes(1, stages, [(("a", "c"), 1), (("b", "c"), 5), (("a", "c"), 2)], ("e",)) == PLAN


def test_a_plan_and_one_with_a_takeover_are_valid() -> None:
    validate(PLAN, NAMES, even_workload(3, 8))
    validate(LOST, NAMES[1:], even_workload(3, 8))
    assert LOST.seats(0) == {"a": 3, "b": 5}
    assert list(LOST.seats(0)) == ["a", "b"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, stages=()), "no stages"),
        (replace(PLAN, stages=PLAN.stages[:1]), "the stages end at layer 2; the workload has 3"),
        (replace(PLAN, idle=("a",)), "'a' appears 2 times"),
        (replace(PLAN, stages=(replace(PLAN.stages[0], loads=(8,)), PLAN.stages[1])), "has 1 loads; it has 2 replicas"),
        (replace(PLAN, stages=(replace(PLAN.stages[0], loads=(3, 4)), PLAN.stages[1])), "add up to 7; a step has 8"),
        (replace(PLAN, stages=(replace(PLAN.stages[0], loads=(-1, 9)), PLAN.stages[1])), "a load of -1"),
        (replace(PLAN, flows=()), "flows for 0 boundaries; 2 stages have one fewer"),
        (replace(PLAN, flows=((Flow("a", "c", 3),),)), "from 'b' after stage 0 add up to 0; its load is 5"),
        (
            replace(PLAN, flows=((Flow("a", "c", 3), Flow("b", "d", 5)),)),
            "to 'c' after stage 0 add up to 3; its load is 8",
        ),
        (replace(PLAN, flows=((Flow("a", "e", 3),),)), "'a' to 'e' after stage 0 is not between replicas of stages 0"),
        (replace(PLAN, flows=((Flow("a", "c", 0),),)), "has 0 micro-batches; it must have at least 1"),
        (replace(PLAN, flows=((*reversed(PLAN.flows[0]),),)), "'a' to 'c' after stage 0 comes twice or late"),
        (replace(PLAN, flows=((PLAN.flows[0][0],) * 2,)), "comes twice or late"),
        (replace(LOST, takeovers=(Takeover(2, "a", 0, ()),)), "of 'a' names stage 2; there are 2"),
        (replace(LOST, takeovers=(Takeover(0, "b", 0, (("b", 3),)),)), "has place 0, or its name is taken"),
        (replace(LOST, takeovers=(Takeover(0, "a", 2, (("b", 3),)),)), "has place 2, or its name is taken"),
        (
            replace(LOST, takeovers=(Takeover(0, "a", 0, (("c", 3),)),)),
            "gives 3 micro-batches to 'c', which then had 0",
        ),
        (
            replace(LOST, takeovers=(Takeover(0, "a", 0, (("b", 9),)),)),
            "gives 9 micro-batches to 'b', which then had 8",
        ),
        (replace(LOST, takeovers=(Takeover(0, "a", 0, (("b", 1), ("b", 2))),)), "names an heir twice"),
        (replace(PLAN, frees_first=("x",)), "node 'x' is to free memory first, and is in no stage"),
        (
            replace(LOST, takeovers=(Takeover(0, "a", 0, (("b", 2),)),)),
            "from 'a' after stage 0 add up to 3; its load is 2",
        ),
    ],
)
def test_a_plan_whose_parts_do_not_fit_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(plan, 3, 8)


@pytest.mark.parametrize(
    ("ids", "message"), [("abcdef", "'f' is neither in a stage nor idle"), ("abcd", "'e' is not in the cluster")]
)
def test_a_plan_names_exactly_the_clusters_nodes(ids: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(PLAN, tuple(ids), even_workload(3, 8))
