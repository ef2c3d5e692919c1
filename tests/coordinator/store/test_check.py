"""A log is checked: every step committed once, every sample counted once."""

from __future__ import annotations

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Record
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
