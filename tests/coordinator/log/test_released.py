"""Logs that earlier versions wrote open, and say what they said.

Each file in released/ has one event of every kind, as a version wrote it. What a change of today makes unreadable there is a log
of somebody's months of training: let the new field have a default, or read the old one. A version that is released gets a file by
``python -m tests.coordinator.log.test_released``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtfm import __version__
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos.run_file.run_file import parse_run
from tests.coordinator.every_event import EVERY_EVENT

RELEASED = Path(__file__).parent / "released"


def lost(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The places in the JSON ``old`` whose value ``new`` does not have."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            yield from lost(value, new[key], f"{where}.{key}") if key in new else [f"{where}.{key}"]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from lost(before, now, f"{where}[{index}]")
    elif old != new:
        yield where


@pytest.mark.parametrize("file", sorted(RELEASED.iterdir()), ids=lambda file: file.stem)
def test_a_log_of_each_released_version_opens_and_says_the_same(file: Path) -> None:
    written = [json.loads(line) for line in file.read_text().splitlines()]
    events = [ev.from_json(fields) for fields in written]
    assert not [
        place
        for old, event in zip(written, events, strict=True)
        for place in lost(old, ev.to_json(event), old["event"])
    ]
    assert all(event.narrate() for event in events)


def test_this_versions_events_are_all_there() -> None:
    (last,) = (file for file in RELEASED.iterdir() if file.stem == __version__)
    kinds = {json.loads(line)["event"] for line in last.read_text().splitlines()}
    assert kinds >= {event.event for event in EVERY_EVENT}


def test_a_run_of_before_goes_on_training_as_it_did() -> None:
    """Each sample of conversations counted alike then, and a run that began so does not change in the middle."""
    began = {"data": {"text_field": "messages"}, "train": {"steps": 9}}
    for event in (ev.RunStarted("5a", began), ev.RunResumed("from the log", began, began)):
        ledger = event.apply(Ledger())
        assert parse_run(ledger.run, "the log").train.loss_per == "sample"


def test_what_is_lost_is_named() -> None:
    assert [*lost({"a": 1, "b": [{"c": 2}]}, {"a": 1, "b": [{"c": 3}], "d": 4})] == [".b[0].c"]
    assert [*lost({"a": 1, "b": 2}, {"b": 2})] == [".a"]


if __name__ == "__main__":
    (RELEASED / f"{__version__}.jsonl").write_text(
        "".join(f"{json.dumps(ev.to_json(event))}\n" for event in EVERY_EVENT)
    )
