"""The parts of a step add up to it."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from tests.bench.explain import LinkParts, Parts, Span, link_parts_of, medians, parts_of, read_trace

STEP = 2
NODES = {
    "busy": [
        Span("apply", 1, 0.8, 1.0),
        Span("forward", STEP, 1.5, 2.5),
        Span("backward", STEP, 3.0, 5.0),
        Span("vote", STEP, 5.9, 6.0),
        Span("apply", STEP, 6.5, 6.7),
    ],
    "idler": [
        Span("apply", 1, 0.9, 1.2),
        Span("forward", STEP, 1.2, 1.4),
        Span("backward", STEP, 5.0, 5.4),
        Span("vote", STEP, 5.6, 5.7),
        Span("apply", STEP, 6.6, 6.9),
    ],
}


def test_the_parts_are_of_the_busiest_node_and_then_of_the_last_one() -> None:
    parts = parts_of(STEP, NODES)
    expected = Parts(filling=0.5, computing=3.0, waiting=0.5, draining=0.4, reducing=0.6, committing=0.5, applying=0.2)
    assert astuple(parts) == pytest.approx(astuple(expected))
    assert sum(astuple(parts)) == pytest.approx(6.7 - 1.0)


def test_a_links_parts_are_before_between_and_after_its_messages() -> None:
    arrivals = [
        Span("receive", 1, 0.7, 0.75, "from idler"),
        Span("receive", STEP, 1.4, 1.5, "from idler"),
        Span("receive", STEP, 3.0, 4.5, "from idler"),
        Span("receive", STEP, 6.0, 6.2, "from other"),
    ]
    parts = link_parts_of(STEP, {**NODES, "busy": [*NODES["busy"], *arrivals]}, ("idler", "busy"))
    assert astuple(parts) == pytest.approx((0.5, 3.0, 2.2))
    assert sum(astuple(parts)) == pytest.approx(sum(astuple(parts_of(STEP, NODES))))


@pytest.mark.parametrize("destination", ["idler", "one without a part"])
def test_a_link_without_messages_counts_as_waited_for_during_the_whole_step(destination: str) -> None:
    parts = link_parts_of(STEP, NODES, ("busy", destination))
    assert astuple(parts) == pytest.approx((6.7 - 1.0, 0, 0))


def test_over_several_steps_each_part_is_the_median() -> None:
    steps = [LinkParts(1, 20, 5), LinkParts(2, 10, 6), LinkParts(9, 30, 4)]
    assert medians(steps) == LinkParts(2, 20, 5)


def test_a_trace_that_is_cut_off_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "n0.json"
    path.write_text(
        '[{"ph": "M", "name": "process_name", "pid": "n0", "args": {"name": "n0"}},\n'
        '{"ph": "M", "name": "thread_name", "pid": "n0", "tid": 4, "args": {"name": "trainer"}},\n'
        '{"ph": "X", "name": "vote 0", "cat": "vote", "tid": 4, "ts": 2000000.0, "dur": 500000.0, '
        '"args": {"step": 3, "index": 0}},\n'
        '{"ph": "X", "na'
    )
    assert read_trace(path) == [Span("vote", 3, 2.0, 2.5, "trainer")]
