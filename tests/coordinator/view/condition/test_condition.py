"""The first line of the page and of `watch`: case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.condition.condition import Condition, Mood, conditions, fitness
from dtfm.coordinator.view.so_far import SoFar
from tests.coordinator.web.stored_run import DEVICES, Telling, finished_run, rising_run, slow_run, stored_run


def folded(records: list[Record]) -> SoFar:
    view = SoFar()
    for record in records:
        view.add(record)
    return view


def first(records: list[Record], later: float = 1.0) -> Condition:
    """The verdict ``later`` seconds after the last record."""
    view = folded(records)
    return conditions(view, view.last + later)[0]


def told(records: list[Record], *events: ev.Event) -> list[Record]:
    last = records[-1]
    more = [Record(last.sequence + n, last.time + n, event) for n, event in enumerate(events, start=1)]
    return [*records, *more]


def until(kind: type, count: int = 1) -> list[Record]:
    """The stored run up to its event of this kind and number."""
    records = stored_run()
    numbers = [record.sequence for record in records if isinstance(record.event, kind)]
    return records[: numbers[count - 1]]


def test_nothing_has_begun() -> None:
    assert conditions(SoFar(), 0.0) == [Condition(Mood.WAIT, "no run yet")]


def test_it_waits_for_nodes_by_name_with_what_they_do() -> None:
    start = stored_run()[:1]
    assert first(start).text == "waits for nodes: none is here"
    reads = until(ev.NodeJoined)
    assert first(reads).text == "waits for lab-a100 (reads the run and its data)"
    measures = until(ev.DeviceTimed)
    assert first(measures) == Condition(Mood.WAIT, "waits for lab-a100 (measures its links)")
    two = until(ev.NodeJoined, 2)
    assert first(two).text == "waits for lab-3090 (reads the run and its data), lab-a100 (measures its links)"
    assert first(until(ev.NodeReady, 5)).text == "a plan is being made"


def test_it_waits_for_more_nodes_or_says_why_no_plan_is_possible() -> None:
    telling = Telling()
    telling.tell(ev.RunStarted("id", {"name": "small", "cluster": {"nodes": 2}}))
    telling.join("lab-a100")
    telling.tell(ev.NodeReady("lab-a100"))
    assert first(telling.records).text == "waits for 1 more node"
    telling.tell(ev.Waiting("1 of 2 nodes are ready"))
    assert first(telling.records).text == "waits for 1 more node (1 of 2 nodes are ready)"
    telling.join("lab-3090")
    telling.tell(ev.NodeReady("lab-3090"))
    telling.tell(ev.Waiting("no node has memory for layer 3"))
    assert first(telling.records) == Condition(Mood.CARE, "waits: no node has memory for layer 3")


def test_a_run_whose_state_is_lost_needs_an_operator_until_it_goes_on() -> None:
    """Also while nodes come and go: the plan of before is still in force in the log."""
    asks = ev.Waiting("say `dtfm-coordinator continue --from weights`", asks=True)
    lost = told(stored_run(), asks)
    verdict = first(lost, later=1e6)
    assert (verdict.mood, verdict.text) == (Mood.CARE, f"needs an operator: {asks.reason}")
    assert fitness(folded(lost), folded(lost).last + 1e6).healthy, "a supervisor that starts it again helps nobody"
    for answered in (ev.RolledBack(3, 5, "why", weights=True), ev.Waiting("1 of 2 nodes are ready")):
        assert "operator" not in first(told(lost, answered)).text


def test_a_plan_is_taken_up_before_it_trains() -> None:
    assert first(until(ev.PlanAdopted)).text == "takes up plan 1: its nodes get ready for it"
    assert first(until(ev.PlanAdopted, 3)).text == "takes up plan 3: its nodes fetch the state of their layers"


def test_it_trains_as_planned_since_the_plan_was_adopted() -> None:
    records = stored_run()
    adopted = [record.time for record in records if isinstance(record.event, ev.PlanAdopted)]
    assert first(records) == Condition(Mood.GOOD, "training, as planned", adopted[-1])
    assert first(until(ev.StepCommitted)).text == "training; the first steps of this plan"
    faster = replace_predicted(records, 60.0)
    assert first(faster).text == "training, 6.0 times as fast as planned"


def replace_predicted(records: list[Record], seconds: float) -> list[Record]:
    """As if the last plan had been expected to take this time."""
    number = max(record.sequence for record in records if isinstance(record.event, ev.PlanAdopted))
    adopted = records[number - 1].event
    assert isinstance(adopted, ev.PlanAdopted)
    changed = replace(records[number - 1], event=replace(adopted, predicted_seconds=seconds))
    return [*records[: number - 1], changed, *records[number:]]


def test_a_node_that_takes_much_longer_than_planned_is_named_with_how_much_and_since_when() -> None:
    records = slow_run()
    verdict = first(records)
    assert (verdict.mood, verdict.text) == (Mood.CARE, "slow: runpod-2 takes 2.9 times the planned time")
    began = [each for each in records if isinstance(each.event, ev.StepCommitted) and each.event.step == 181]
    assert verdict.since == began[0].time
    assert first(records[:-10]).text == "training, as planned", "two slow steps may be noise"


def test_nodes_that_are_all_as_slow_are_no_node_that_is_slow() -> None:
    """Devices deliver less than they were timed at, all alike: what the plan makes of it is corrected by steps."""
    records = [half_as_fast(record) for record in stored_run()]
    assert folded(records).slow == {}


def half_as_fast(record: Record) -> Record:
    if not isinstance(record.event, ev.StepCommitted):
        return record
    times = {node: 2 * seconds for node, seconds in record.event.compute_seconds.items()}
    return replace(record, event=replace(record.event, compute_seconds=times))


def test_steps_that_take_longer_though_no_node_does_point_at_the_links() -> None:
    text = first(replace_predicted(stored_run(), 4.0)).text
    assert text.startswith("slow: a step takes 9.97 s, 4 s were planned, though no node"), text


def test_the_loss_rises_since_the_step_where_it_was_lowest() -> None:
    records = rising_run()
    verdict = first(records)
    assert verdict.mood is Mood.CARE
    assert verdict.text.startswith("loss rises since step 18"), verdict.text
    assert first(records[:-22]).text == "training, as planned", "not yet"
    back = folded(told(records, ev.RolledBack(150, 210, "an operator wished so")))
    assert (back.trend.count, back.held_out.low) == (0, None), "it begins again"


def test_the_held_out_loss_rises_while_the_training_loss_falls() -> None:
    records = told(stored_run(), ev.Evaluated(160, 4.0, 64, 9.1), ev.Evaluated(180, 4.2, 64, 9.1))
    assert first(records).text.startswith("held-out loss rises since step 150, from 3.83 to 4.2")
    assert first(records[:-1]).text == "training, as planned", "one is noise"


def test_a_step_that_does_not_end_is_late_and_then_the_run_stands_still() -> None:
    records = stored_run()
    assert first(records, 35.0).text == "training, as planned"
    late = first(records, 60.0)
    assert (late.mood, late.text) == (Mood.CARE, "late: step 181 goes on; steps took 9.98 s")
    still = first(records, 400.0)
    assert (still.mood, still.since) == (Mood.BAD, records[-1].time)
    assert still.text == "stands still: step 181 does not end; steps took 9.98 s"
    view = folded(records)
    assert [fitness(view, view.last + seconds).healthy for seconds in (1, 60, 400)] == [True, True, False]


def test_a_pause_a_stop_and_an_end_come_before_all_else() -> None:
    records = slow_run()
    paused = told(records, ev.RunPaused("alice"))
    since = records[-1].time + 1
    assert first(paused) == Condition(Mood.WAIT, "paused by alice; `dtfm-coordinator continue` goes on", since)
    assert first(told(paused, ev.RunContinued("alice"))).text.startswith("slow: ")
    stops = first(told(records, ev.RunPaused("alice", ends=True))).text
    assert stops == "is stopped by alice: it ends once its last step is in a checkpoint"
    stopped = told(records, ev.RunStopped(192, "alice stopped the run after step 192"))
    assert first(stopped).text == (
        "no coordinator: alice stopped the run after step 192; `dtfm-coordinator serve` goes on"
    )
    over = first(finished_run())
    assert (over.mood, over.text) == (Mood.GOOD, "finished: all 240 steps are done")
    failed = told(records, ev.RunFailed(192, "no plan is possible: layer 3 is too large"))
    assert first(failed).text == "failed: no plan is possible: layer 3 is too large"
    assert not fitness(folded(failed), 0.0).healthy
    unwell = fitness(folded(records), 0.0, "the disk is full")
    assert (unwell.healthy, unwell.reason) == (False, "the disk is full")


def test_a_checkpoint_that_fails_is_told_until_one_is_written() -> None:
    failed = told(stored_run(), ev.CheckpointFailed(150, "the disk is full"))
    assert first(failed).text == "trains, but the last checkpoint failed: the disk is full"
    assert first(told(failed, ev.CheckpointWritten(160, "c", "ab"))).text == "training, as planned"


def test_what_is_less_urgent_comes_after_it() -> None:
    view = folded(told(slow_run(), ev.CheckpointFailed(150, "the disk is full")))
    texts = [each.text for each in conditions(view, view.last)]
    assert texts == [
        "slow: runpod-2 takes 2.9 times the planned time",
        "trains, but the last checkpoint failed: the disk is full",
    ]


@pytest.mark.parametrize("node", DEVICES)
def test_a_quarantine_alone_is_no_verdict(node: str) -> None:
    records = told(stored_run(), ev.NodeQuarantined(node, Charge.AUDIT, "other activations", 180))
    assert first(records).text == "training, as planned"
