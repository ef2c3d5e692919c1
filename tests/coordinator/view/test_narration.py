"""The sentences about events and plans."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.view.narration import describe_plan, narrate
from dtfm.scheduler.model.plan import Plan, Route, Stage
from tests.coordinator.every_event import EVERY_EVENT


def test_a_plan_is_described_by_its_stages_last_layers_included() -> None:
    stages = (Stage((0, 5), ("a", "b")), Stage((5, 10), ("c", "d")))
    plan = Plan(1, stages, (Route(("a", "c"), 1), Route(("b", "d"), 1)))
    assert describe_plan(plan) == "2 stages: layers 0-4 on a, b; layers 5-9 on c, d"
    assert describe_plan(Plan(1, (Stage((0, 10), ("a",)),), (Route(("a",), 1),))) == "1 stage: layers 0-9 on a"


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.event)
def test_every_event_is_one_sentence(event: ev.Event) -> None:
    assert narrate(event)
    assert "\n" not in narrate(event)
