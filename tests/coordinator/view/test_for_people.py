"""Which events a person must know of."""

from __future__ import annotations

import pytest

from dtfm.coordinator.command.options import print_record
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Record
from dtfm.coordinator.view.for_people import Severity, is_for_people, severity
from tests.coordinator.every_event import EVERY_EVENT


def committed(step: int) -> ev.StepCommitted:
    return ev.StepCommitted(step, 1, 2.5, 8192, 0.5, 1.25, 32, {}, {})


def test_what_changes_the_run_is_told_and_its_bookkeeping_is_not() -> None:
    told = {event.event for event in EVERY_EVENT if is_for_people(event)}
    assert {event.event for event in EVERY_EVENT} - told == {
        "codecs_chosen",
        "data_confirmed",
        "device_shown",
        "device_timed",
        "enrolled",
        "gradients_clipped",
        "node_prepares",
        "node_ready",
        "plan_started",
        "snapshot_written",
        "state_agreed",
        "suspected",
        "ways_chosen",
        "work_audited",
    }


def test_events_are_as_serious_as_a_person_must_take_them() -> None:
    of = {word: {each.event for each in EVERY_EVENT if severity(each).word == word} for word in ("warning", "problem")}
    assert of["problem"] == {"digest_mismatch", "node_quarantined", "rolled_back", "run_failed"}
    assert of["warning"] >= {
        "checkpoint_failed",
        "disk_short",
        "node_refused",
        "plan_failed",
        "run_paused",
        "step_aborted",
    }
    assert not of["warning"] & {"waiting", "plan_adopted", "step_committed", "node_joined", "evaluated"}
    lost, home = ev.NodeLeft("a", "its connection broke"), ev.NodeLeft("a", "in order: SIGTERM")
    assert [severity(each) for each in (lost, home)] == [Severity.WARNING, Severity.INFO]
    slower, faster = (
        ev.DeviceDrifted("a", 1.0, f"in training it is 3.3 times {how} than planned") for how in ("slower", "faster")
    )
    assert [severity(each) for each in (slower, faster)] == [Severity.WARNING, Severity.INFO]


def test_of_steps_the_first_and_every_tenth_are_told() -> None:
    assert [step for step in range(1, 32) if is_for_people(committed(step))] == [1, 10, 20, 30]


def test_measured_links_are_told_if_something_is_wrong_or_has_changed() -> None:
    good, bad = ev.Link("a", "b", 0.001, 1e9), ev.Link("b", "a", 0.0, 0.0, "no route")
    assert not is_for_people(ev.LinksMeasured("a", (good,)))
    assert is_for_people(ev.LinksMeasured("a", (good, bad)))
    assert is_for_people(ev.LinksMeasured("a", (good,), reason="it has become slower"))


def test_who_is_let_in_to_direct_the_run_is_told() -> None:
    assert is_for_people(ev.Enrolled("bob", "operator", "MFkw", "0123456789ab"))


def test_a_record_is_printed_to_people_if_they_must_know_it_or_want_all(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, loud = Record(1, 0.0, ev.NodeReady("a")), Record(2, 0.0, ev.NodeLeft("a", "why"))
    for record in (quiet, loud):
        print_record(record, json_lines=False, all_events=False)
    assert len(read(capsys)) == 1
    for record in (quiet, loud):
        print_record(record, json_lines=False)
        print_record(record, json_lines=True, all_events=False)
    assert len(read(capsys)) == 4


def read(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()
