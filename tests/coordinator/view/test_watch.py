"""What people see: the live view, members, and the audit."""

from __future__ import annotations

import pytest
from rich.console import Console

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.audit import audit
from dtfm.coordinator.log.store import Record
from dtfm.coordinator.view.members import member_documents
from dtfm.coordinator.view.narration import narrate
from dtfm.coordinator.view.watch import View, render, sparkline
from dtfm.protos import control_pb2 as wire
from tests.coordinator.log.test_store import EVERY_EVENT
from tests.coordinator.script import World, training


def records(world: World) -> list[Record]:
    start = ev.RunStarted("run-id", dict(world.start.run))
    return [Record(i, 1000.0 + i, event) for i, event in enumerate([start, *world.log], 1)]


def a_long_run() -> World:
    world = training("a", "b", "c", "d", train={"steps": 30})
    for _ in range(20):
        world.now += 1.0
        world.step()
    world.evaluate()
    world.save()
    world.fail_step("a", wire.NON_FINITE)
    return world


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.event)
def test_every_event_is_one_sentence(event: ev.Event) -> None:
    assert narrate(event)
    assert "\n" not in narrate(event)


def test_the_view_fits_a_terminal_of_100_by_30() -> None:
    view = View()
    for record in records(a_long_run()):
        view.add(record)
    console = Console(width=100, height=30)
    with console.capture() as shown:
        console.print(render(view))
    lines = shown.get().splitlines()
    assert len(lines) <= 30
    assert max(len(line) for line in lines) <= 100
    text = "\n".join(lines)
    for expected in (
        "step 20/30",
        "loss 0.5000",
        "128 tokens/s",
        "held out 2.0000",
        "a, b",
        "c, d",
        "step 21 was aborted",
    ):
        assert expected in text, expected


def test_the_view_can_be_shown_before_anything_has_happened() -> None:
    console = Console(width=100, height=30)
    with console.capture() as shown:
        console.print(render(View()))
    assert "no run yet" in shown.get()


def test_a_sparkline_goes_from_the_smallest_to_the_largest() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_a_member_document_says_what_the_node_computes() -> None:
    world = training("a", "b")
    world.join("c")
    seen = {document["node"]: document for document in member_documents(world.state.ledger)}
    assert (seen["a"]["status"], seen["a"]["stage"], seen["a"]["layers"]) == ("computing", 0, [0, 2])
    assert (seen["c"]["status"], seen["c"]["stage"]) == ("idle", None)
    assert seen["a"]["links"]["b"] == {"latency_seconds": 0.001, "bandwidth": 1e9, "codecs": {}}


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
    result = audit(records(world))
    assert result.findings == ()
    assert (result.steps, result.redone, result.aborted, result.samples) == (10, 1, 1, 80)


def test_the_audit_finds_impossible_events() -> None:
    log = records(a_long_run())
    committed = next(i for i, record in enumerate(log) if isinstance(record.event, ev.StepCommitted))

    def without(index: int) -> list[Record]:
        events = [record.event for i, record in enumerate(log) if i != index]
        return [Record(i, 0.0, event) for i, event in enumerate(events, 1)]

    assert "step 2 is committed after step 0" in audit(without(committed)).findings[0].sentence
    assert "is missing" in audit(log[:5] + log[6:]).findings[0].sentence
    wrong = ev.StepCommitted(21, 1, 0.5, 112, 2.0, 1.0, 7, {}, {})
    last = [*log[:-2], Record(log[-2].sequence, 0.0, wrong)]
    assert [finding.sentence for finding in audit(last).findings] == ["step 21 counts 7 samples, the run says 8"]
