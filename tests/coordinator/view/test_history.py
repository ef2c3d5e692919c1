"""The run's past as curves, lanes and plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hypothesis import given, strategies as st

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record, Snapshot
from dtfm.coordinator.view import story_snapshot
from dtfm.coordinator.view.history import MOST_POINTS, Curve, History, Point
from dtfm.coordinator.view.so_far import SoFar
from dtfm.coordinator.view.story import Story
from tests.coordinator.script import training
from tests.coordinator.web.stored_run import stored_run


def told(records: Sequence[Record]) -> Story:
    story = Story()
    for record in records:
        story.add(record)
    return story


def lane(history: History, node: str, at: int = 10**9) -> list[str]:
    spans = [span for span in history.spans_until(at) if span.node == node]
    return [f"{span.doing} {span.stage}" if span.stage is not None else span.doing for span in spans]


@given(st.integers(1, 5 * MOST_POINTS))
def test_a_curve_stays_small_and_loses_no_step_and_no_mean(steps: int) -> None:
    curve = Curve()
    for step in range(1, steps + 1):
        curve.add(Point(step, step, float(step), float(step), tokens=10, seconds=2.0))
    assert len(curve.points) <= MOST_POINTS
    assert sum(point.count for point in curve.points) == steps
    assert all(point.count == curve.every for point in curve.points[:-1])
    assert math.isclose(sum(point.loss * point.count for point in curve.points), steps * (steps + 1) / 2)
    assert {point.tokens_per_second for point in curve.points} == {5.0}
    assert [point.step for point in curve.points] == sorted({point.step for point in curve.points})


def test_a_lane_says_what_a_node_did() -> None:
    history = told(stored_run()).history
    start = ["joining", "measuring", "ready"]
    assert lane(history, "vast-7") == [*start, "switching 1", "training 1"]
    assert lane(history, "attic") == [*start, "switching 2", "training 2", "quarantined"]
    assert lane(history, "lab-3090") == [*start, *["switching 0", "training 0"] * 4]


def test_a_lane_is_as_it_was_at_an_earlier_event() -> None:
    records = stored_run()
    story = told(records)
    left = next(record.sequence for record in records if isinstance(record.event, ev.NodeLeft))
    before, after = (
        [span for span in story.history.spans_until(at) if span.node == "vast-7"][-1] for at in (left - 1, left)
    )
    assert (before.doing, before.ended, before.why) == ("training", 0.0, "")
    assert (after.ended - before.began, after.why) == (after.ended - after.began, "no heartbeat for 30 s")
    assert "runpod-2" not in {span.node for span in story.history.spans_until(left)}


def test_lanes_end_when_the_run_is_over_or_its_coordinator_is_gone() -> None:
    world = training("a", "b")
    world.finish_run()
    stopped = training("a", "b")
    stopped.log.append(ev.CoordinatorStopped("Ctrl-C"))
    for records in (world.records, stopped.records):
        spans = told(records).history.spans_until(len(records))
        assert {span.node for span in spans} == {"a", "b"}
        assert all(span.last for span in spans)


def test_the_run_at_each_event_is_the_fold_up_to_it_from_a_near_one_on() -> None:
    records, folded, taken = stored_run(), Story(), list[Snapshot]()
    story = told(records)
    read = 0

    def reading(after: int) -> Iterator[Record]:
        nonlocal read
        for record in records[after:]:
            read += 1
            yield record

    def earlier(sequence: int) -> SoFar:
        return story_snapshot.newest(each for each in reversed(taken) if each.sequence <= sequence).now

    for record in records:
        folded.add(record)
        if record.sequence % 10 == 0:
            taken.append(story_snapshot.take(folded))
        read = 0
        assert story.at(record.sequence, reading, earlier) == folded.now
        assert read <= 10, "it begins from a kept snapshot"
