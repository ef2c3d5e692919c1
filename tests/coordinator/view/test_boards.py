"""The event log as curves."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Record
from dtfm.coordinator.view.boards import TensorBoard, points

STEP = ev.StepCommitted(1, 1, 2.5, 8192, 0.5, 2.0, 32, {}, {})
LOG: list[ev.Event] = [
    ev.RunStarted("ab12", {"name": "demo", "train": {"steps": 2}, "checkpoint": {"uri": "file:///home/me"}}),
    ev.NodeLeft("a", "why"),
    STEP,
    ev.StepCommitted(2, 1, 2.25, 8192, 0.5, 2.0, 32, {}, {}, resumed=True),
    ev.Evaluated(2, 2.75, 64, 3.2),
    ev.Waiting("nobody bends a curve by waiting"),
]
RECORDS = [Record(number, 1.7e9 + number, event) for number, event in enumerate(LOG, 1)]


def test_a_step_that_began_earlier_has_no_speed() -> None:
    assert points(STEP) == {
        "loss": 2.5,
        "gradient_norm": 0.5,
        "tokens": 8192,
        "seconds_per_step": 2.0,
        "tokens_per_second": 4096,
    }
    assert set(points(LOG[3])) == {"loss", "gradient_norm", "tokens"}


def written(folder: Path) -> Iterator[Event]:
    """What TensorBoard reads. A file has for each record its length (8 bytes), 4 bytes, the record, 4 bytes."""
    (file,) = folder.glob("*tfevents*")
    content = file.read_bytes()
    while content:
        (length,) = struct.unpack_from("<Q", content)
        yield Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def test_tensorboard_shows_curves_and_what_bends_them(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for record in RECORDS:
        board.add(record)
    board.close()
    found = [(event.step, value, event.wall_time) for event in written(tmp_path) for value in event.summary.value]
    curves = [(value.tag, step, value.simple_value) for step, value, _ in found if value.HasField("simple_value")]
    assert [point for point in curves if "loss" in point[0]] == [
        ("loss", 1, 2.5),
        ("loss", 2, 2.25),
        ("held_out_loss", 2, 2.75),
    ]
    assert ("tokens_per_second", 1, 4096) in curves
    told = [value.tensor.string_val[0].decode() for _, value, _ in found if value.HasField("tensor")]
    assert told == ["a left: why"]
    assert found[0][2] == RECORDS[1].time


def test_an_earlier_projection_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    TensorBoard(tmp_path).close()
    with pytest.raises(ValueError, match="has TensorBoard's files already; give a new folder"):
        TensorBoard(tmp_path)


def test_without_its_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"the package tensorboardX is not installed; install it with: .*pip install"):
        TensorBoard(tmp_path)
