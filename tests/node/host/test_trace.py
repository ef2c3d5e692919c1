"""Listeners are called at both ends of a span; spans are written as a Chrome trace."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dtfm.node.host.trace import Activity, Span, forget, listen, note_span, span, write_trace


def test_a_listener_is_called_at_beginning_and_end_in_the_spans_thread() -> None:
    seen: list[tuple[Span, str]] = []

    def see(span: Span) -> None:
        seen.append((span, threading.current_thread().name))

    listen(see)
    try:
        worker = threading.Thread(target=_reduce, name="reduce")
        worker.start()
        worker.join(10)
    finally:
        forget(see)
    (begun, first), (over, second) = seen
    assert (begun.activity, begun.step, begun.index, begun.track, begun.ended) == (
        Activity.REDUCE,
        3,
        1,
        "reduce",
        None,
    )
    assert over.ended is not None
    assert over.ended >= over.began == begun.began
    assert first == second == "reduce"


def _reduce() -> None:
    with span(Activity.REDUCE, 3, 1):
        pass


def test_without_listeners_a_span_costs_nothing() -> None:
    with span(Activity.FORWARD, 1), span(Activity.DECODE, 1):
        note_span(Activity.RECEIVE, 1, 0, "from a", 0.0)


def test_a_trace_names_node_and_tracks_and_has_a_complete_event_per_span(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with write_trace(path, "n1"):
        with span(Activity.FORWARD, 7, 2):
            note_span(Activity.RECEIVE, 7, 2, "from n0", 0.0)
        _reduce()
    events = json.loads(path.read_text())
    names = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [("process_name", "n1"), ("thread_name", "from n0"), ("thread_name", "MainThread")]
    spans = [(e["name"], e["args"]["step"], e["tid"]) for e in events if e["ph"] == "X"]
    assert spans == [("receive 2", 7, 0), ("forward 2", 7, 1), ("reduce 1", 3, 1)]
    assert all(e["dur"] >= 0 and e["pid"] == "n1" for e in events if e["ph"] == "X")


def test_a_trace_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--trace another file"), write_trace(tmp_path / "none" / "trace.json", "n1"):
        pass


def test_the_trace_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with write_trace(path, "n1"):
        assert len(json.loads(path.read_text() + "]")) == 1
        with span(Activity.FORWARD, 7, 2):
            pass
        spans = [event["name"] for event in json.loads(path.read_text() + "]") if event["ph"] == "X"]
    assert spans == ["forward 2"]
