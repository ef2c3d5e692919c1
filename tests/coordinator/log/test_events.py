"""Events as JSON, in the form that is stored, printed and read again: `log/events.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Record
from dtfm.scheduler.formats.plan import plan_document
from tests.coordinator.every_event import CARRIED_ON, EVERY_EVENT, KEPT, PLAN


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.event)
def test_every_event_is_read_back_from_its_json_unchanged(event: ev.Event) -> None:
    record = Record(7, 12.5, event)
    fields = record.to_json()
    assert list(fields)[:3] == ["event", "sequence", "time"]
    assert Record.from_json(fields) == record


def test_a_plan_in_the_log_is_a_plan_file() -> None:
    fields = ev.to_json(ev.PlanAdopted(1, PLAN, "why", 0))
    assert fields["plan"] == {
        "generation": 1,
        "stages": [
            {
                "layers": [0, 2],
                "replicas": ["a", "b"],
                "loads": [3, 5],
                "in_flight": [4, 6],
                "keeping": [],
                "island": 0,
            },
            {"layers": [2, 3], "replicas": ["c"], "loads": [8], "in_flight": [1], "keeping": [], "island": 0},
        ],
        "flows": [
            [
                {"sender": "a", "receiver": "c", "micro_batches": 3},
                {"sender": "b", "receiver": "c", "micro_batches": 5},
            ]
        ],
        "idle": ["d"],
        "takeovers": [],
        "rounds": {"since": 0, "steps": 0, "count": 0, "before": 0, "restarts": False, "batches_each": 1, "ahead": 0},
        "owed": {"since": 0, "again": [], "new": 0},
        "counted": {"since": 0, "had": []},
        "frees_first": [],
    }
    for plan in (PLAN, CARRIED_ON, KEPT):
        assert ev.to_json(ev.PlanAdopted(1, plan, "why", 0))["plan"] == plan_document(plan)


@pytest.mark.parametrize("fields", [{"event": "from_the_future"}, {"event": "node_left"}, {}, {"event": 3}])
def test_json_that_is_no_event_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not an event of this version"):
        ev.from_json(fields)
