"""The event log as curves."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Record
from dtfm.coordinator.view.boards import TensorBoard, WeightsAndBiases, points

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


@pytest.mark.parametrize("before", [0, 2])
def test_wandb_gets_each_point_once_under_the_runs_own_id(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the first points ``before``: W&B counts them."""
    asked: dict[str, Any] = {}
    sent: list[dict[str, float]] = []

    def init(**keywords: Any) -> Any:
        asked.update(keywords)
        return SimpleNamespace(
            step=before, define_metric=lambda *_, **__: None, log=sent.append, finish=lambda: sent.append({})
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = WeightsAndBiases("stories")
    for record in RECORDS:
        board.add(record)
    board.close()
    assert (asked["project"], asked["name"], asked["id"], asked["resume"]) == ("stories", "demo", "ab12", "allow")
    assert asked["config"] == {"train": {"steps": 2}}  # and nothing that names machines or places
    steps = [1, 2, 2]
    expected = [points(event) for event in LOG if points(event)]
    every = [{"step": step, **found} for step, found in zip(steps, expected, strict=True)]
    assert sent == [*every[before:], {}]


@pytest.mark.parametrize(("package", "make"), [("tensorboardX", TensorBoard), ("wandb", WeightsAndBiases)])
def test_without_its_package_it_says_what_to_install(
    package: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"the package {package} is not installed; install it with: .*pip install"):
        make(tmp_path)
