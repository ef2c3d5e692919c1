"""The part of a run file that trackers show."""

from __future__ import annotations

import pytest

from dtfm.coordinator.track.settings import HIDDEN, settings_of
from tests.coordinator.script import run_table


@pytest.mark.parametrize("place", ["/home/bob/x.jsonl", "~/x", "./x", "s3://bucket/x", "coordinator:///x", "file:/x"])
def test_places_are_left_out(place: str) -> None:
    shown = settings_of({**run_table(), "data": {"source": place, "sequence_length": 8}, "checkpoint": {"uri": place}})
    assert shown["data"] == {"source": HIDDEN, "sequence_length": 8}
    assert "checkpoint" not in shown


def test_how_the_run_learns_is_shown_without_addresses() -> None:
    shown = settings_of(
        {"seed": 3, "train": {"steps": 5}, "data": {"source": "hf:a/b"}, "model": {"pretrained": "203.0.113.7:80"}}
    )
    assert shown == {
        "seed": 3,
        "train": {"steps": 5},
        "data": {"source": "hf:a/b"},
        "model": {"pretrained": "(address hidden)"},
    }
