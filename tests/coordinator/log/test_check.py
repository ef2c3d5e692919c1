"""A log is checked: every step committed once, every sample counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.log import events as ev, step_times
from dtfm.coordinator.log.store import Record, Store
from tests.coordinator.script import aborted_after_twenty_steps, training
from tests.coordinator.stores import checked


def test_the_audit_of_a_correct_log_finds_nothing() -> None:
    world = training("a", "b", train={"steps": 10})
    world.step()
    world.step()
    world.save()
    world.step()
    world.lose("b")
    world.join("b2")
    world.settle()
    world.finish_run()
    result = checked(world.records)
    assert result.findings == ()
    assert (result.steps, result.redone, result.aborted, result.samples) == (10, 1, 1, 80)


def test_the_audit_finds_impossible_events() -> None:
    log = aborted_after_twenty_steps().records
    committed = next(i for i, record in enumerate(log) if isinstance(record.event, ev.StepCommitted))

    def without(index: int) -> list[Record]:
        events = [record.event for i, record in enumerate(log) if i != index]
        return [Record(i, 0.0, event) for i, event in enumerate(events, 1)]

    assert "step 2 is committed after step 0" in checked(without(committed)).findings[0].sentence
    assert "is missing" in checked(log[:5] + log[6:]).findings[0].sentence
    wrong = ev.StepCommitted(21, 1, 0.5, 112, 2.0, 1.0, 7, {}, {})
    last = [*log[:-2], Record(log[-2].sequence, 0.0, wrong)]
    assert [finding.sentence for finding in checked(last).findings] == ["step 21 counts 7 samples, the run says 8"]


def test_a_step_that_was_changed_after_its_times_were_summed_up_is_found(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "EVERY", 20)
    events = [record.event for record in aborted_after_twenty_steps().records][:20]
    with Store(store_url, write=True) as store:
        store.append(events)
        store.append([store.step_times(0, 20)])
        records = list(store.read())
    assert checked(records).findings == ()
    at = next(i for i, record in enumerate(records) if isinstance(record.event, ev.StepCommitted))
    committed = records[at].event
    assert isinstance(committed, ev.StepCommitted)
    records[at] = replace(records[at], event=replace(committed, tokens=1))
    assert [finding.sentence for finding in checked(records).findings] == [
        "the steps among events 1 to 20 are not those that were summed up"
    ]
