"""The sentences about events and plans."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.wording import describe_gap, describe_plan, describe_seconds, seconds_in_words
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.every_event import EVERY_EVENT, KEPT, PLAN


def test_a_plan_is_described_by_its_stages_last_layers_included() -> None:
    stages = (Stage((0, 5), ("a", "b"), ()), Stage((5, 10), ("c", "d"), ()))
    plan = from_routes(1, stages, [(("a", "c"), 1), (("b", "d"), 1)])
    assert describe_plan(plan) == (
        "2 stages: layers 0-4 on a, b; layers 5-9 on c, d; heaviest routes: a -> c 1 micro-batch, b -> d 1"
    )
    assert describe_plan(Plan(1, (Stage((0, 10), ("a",), (1,)),), ())) == "1 stage: layers 0-9 on a"
    assert describe_plan(KEPT) == (
        "1 stage: layers 0-0 on a; layers are computed again on a; optimizer state is in the host's memory of a"
    )


def test_of_a_large_plan_some_replicas_and_the_heaviest_routes_are_named() -> None:
    names = [tuple(f"{letter}{number}" for number in range(64)) for letter in "ab"]
    routes = [(pair, 30 if number == 5 else 2) for number, pair in enumerate(zip(*names, strict=True))]
    plan = from_routes(1, [Stage((0, 5), names[0], ()), Stage((5, 10), names[1], ())], routes)
    described = describe_plan(plan)
    assert "layers 0-4 on a0, a1, a2, a3, a4, a5, a6, a7 and 56 more; layers 5-9 on b0" in described
    assert "heaviest routes: a5 -> b5 30 micro-batches, " in described
    assert described.endswith(", and 61 more")
    assert len(described) < 300


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.event)
def test_every_event_is_one_sentence(event: ev.Event) -> None:
    assert event.narrate()
    assert "\n" not in event.narrate()


def test_a_plan_is_adopted_with_its_seconds_and_the_bound() -> None:
    def said(predicted: float | None, bound: float | None) -> str:
        return ev.PlanAdopted(1, PLAN, "why", 0, predicted, bound).narrate()

    assert said(12.3, 8.12).endswith("; 12.3 s a step, at best 8.12 s. why")
    assert said(12.3, None).endswith("; 12.3 s a step. why")
    assert said(None, None) == f"plan 1 from step 1 on: {describe_plan(PLAN)}. why"


@pytest.mark.parametrize(
    ("gap", "sentence"),
    [
        (1.6, "No plan can take less than 19.0 s; this one takes 1.6 times as long."),
        (1.04, "No plan can take less than 19.0 s; this one takes 4% longer."),
        (1.004, "No plan can take less than 19.0 s; this one is as good as any."),
    ],
)
def test_the_gap_is_a_plain_sentence(gap: float, sentence: str) -> None:
    assert describe_gap(19.0, gap) == sentence


def test_seconds_have_three_digits() -> None:
    assert [seconds_in_words(s) for s in (0.01234, 8.123, 19.0, 1234.4)] == ["0.0123 s", "8.12 s", "19.0 s", "1,234 s"]
    assert describe_seconds(None, 2.0) == ""


@pytest.mark.parametrize(
    ("predicted", "bound", "measured", "said"),
    [
        (4.41, 4.4, 4.3, "4.41 s a step"),  # devices are faster than when it was made
        (4.41, 4.4, 4.41, "4.41 s a step, at best 4.4 s"),
        (1.25, -0.165, None, "1.25 s a step"),
        (1.25, 0.0, None, "1.25 s a step"),
        (1.25, 0.6, None, "1.25 s a step"),  # a gap above 2
        (1.25, 0.63, None, "1.25 s a step, at best 0.63 s"),
        (1.25, 1.3, None, "1.25 s a step, at best 1.25 s"),
    ],
)
def test_a_bound_is_told_where_it_can_be_and_says_something(
    predicted: float, bound: float, measured: float | None, said: str
) -> None:
    assert describe_seconds(predicted, bound, measured) == said
