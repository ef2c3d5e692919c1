"""Events as JSON, as they are stored, printed and read again: `log/events.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import Event, PlanFailed, SnapshotWritten, StandbyPromoted, from_json, from_text
from dtfm.coordinator.log.store import Record
from dtfm.scheduler.formats.plan import plan_document
from tests.coordinator.every_event import CARRIED_ON, DESCRIBED, EVERY_EVENT, KEPT, PLAN


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
            {"layers": [0, 2], "replicas": ["a", "b"], "loads": [3, 5], "in_flight": [4, 6], "keeping": []},
            {"layers": [2, 3], "replicas": ["c"], "loads": [8], "in_flight": [1], "keeping": []},
        ],
        "flows": [
            [
                {"sender": "a", "receiver": "c", "micro_batches": 3},
                {"sender": "b", "receiver": "c", "micro_batches": 5},
            ]
        ],
        "idle": ["d"],
        "takeovers": [],
    }
    for plan in (PLAN, CARRIED_ON, KEPT):
        assert ev.to_json(ev.PlanAdopted(1, plan, "why", 0))["plan"] == plan_document(plan)


def test_a_log_that_does_not_say_how_nodes_keep_what_they_need_is_read_as_they_did() -> None:
    older = ev.to_json(ev.PlanAdopted(1, PLAN, "why", 0))
    for stage in older["plan"]["stages"]:
        del stage["keeping"]
    assert from_json(older) == ev.PlanAdopted(1, PLAN, "why", 0)
    described = ev.to_json(ev.RunDescribed(DESCRIBED))
    for key in ("checkpointing", "optimizer_state", "copy_bytes_per_parameter_byte"):
        del described["described"]["workload"][key]
    for key in ("kept_bytes", "working_bytes"):
        del described["described"]["workload"]["layers"][0][key]
    assert from_json(described) == ev.RunDescribed(DESCRIBED)


def with_routes(routes: list[dict[str, Any]]) -> dict[str, Any]:
    """A plan_adopted event as it was before plans had flows."""
    stages = [
        {"layers": [0, 2], "replicas": ["a", "b"], "in_flight": 4},
        {"layers": [2, 3], "replicas": ["c"], "in_flight": 1},
    ]
    plan = {"generation": 3, "stages": stages, "routes": routes, "idle": ["d"]}
    return {"event": "plan_adopted", "generation": 3, "plan": plan, "reason": "why", "step": 7, "counts_from": 2}


def test_a_plan_with_routes_is_read_as_their_loads_and_flows() -> None:
    routes = [
        {"nodes": ["b", "c"], "micro_batches": 1},
        {"nodes": ["a", "c"], "micro_batches": 3},
        {"nodes": ["b", "c"], "micro_batches": 4},
    ]
    stages = (replace(PLAN.stages[0], in_flight=(4, 4)), replace(PLAN.stages[1], in_flight=(1,)))
    expected = ev.PlanAdopted(3, replace(PLAN, generation=3, stages=stages), "why", 7, counts_from=2)
    assert from_json(with_routes(routes)) == expected
    assert from_text(json.dumps(with_routes(routes))) == expected


def test_one_number_in_flight_per_stage_is_that_of_each_replica() -> None:
    event = ev.to_json(ev.PlanAdopted(3, PLAN, "why", 7))
    stages = event["plan"]["stages"]
    stages[0]["in_flight"], stages[1]["in_flight"] = 4, 0
    expected = replace(PLAN, stages=(replace(PLAN.stages[0], in_flight=(4, 4)), replace(PLAN.stages[1], in_flight=())))
    assert from_json({"event": "plan_adopted", **event}) == ev.PlanAdopted(3, expected, "why", 7)


@pytest.mark.parametrize(
    "routes", [[{"nodes": ["a"], "micro_batches": 1}], [{"nodes": ["c", "c"], "micro_batches": 1}], [{}]]
)
def test_a_plan_with_impossible_routes_is_no_event(routes: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="not an event of this version"):
        from_json(with_routes(routes))


@pytest.mark.parametrize("fields", [{"event": "from_the_future"}, {"event": "node_left"}, {}, {"event": 3}])
def test_json_that_is_no_event_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not an event of this version"):
        ev.from_json(fields)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"event": "plan_failed", "generation": 1, "node": "a", "reason": "why", "backup": True},
            PlanFailed(1, "a", "why", snapshot_damaged=True),
        ),
        (
            {"event": "state_copied", "node": "a", "incarnation": "1", "layers": [0, 2], "step": 3},
            StandbyPromoted("a", "1", (0, 2), 3, "state_copied"),
        ),
        (
            {"event": "backup_kept", "step": 3, "parts": [], "holders": {"a": [[0, 2]]}, "seconds": 1.0},
            SnapshotWritten(3, (), {"a": ((0, 2),)}, 1.0, "backup_kept"),
        ),
    ],
)
def test_events_are_read_under_their_old_names(old: dict[str, Any], new: Event) -> None:
    assert from_json(old) == new
    assert from_text(json.dumps(old)) == new
