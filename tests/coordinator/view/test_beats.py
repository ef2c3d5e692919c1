"""What members say in heartbeats, on the page."""

from __future__ import annotations

import json
import math

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.view.page import page_text
from dtfm.coordinator.view.story import Story
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import training
from tests.coordinator.view.condition.test_condition import until


def test_the_page_says_how_busy_a_gpu_is_and_how_warm() -> None:
    story = Story()
    for record in until(ev.NodeJoined, 2):
        story.add(record)
    beats = {"lab-3090": wire.Heartbeat(count=1), "lab-a100": wire.Heartbeat(load=0.97, celsius=71)}
    found = json.loads(page_text(story.now, story.history, 0, story.now.last, beats))
    assert [node["gpu"] for node in found["nodes"]] == [None, {"load": 0.97, "celsius": 71.0}]
    then = json.loads(page_text(story.now, story.history, 0, story.now.last))
    assert [node["gpu"] for node in then["nodes"]] == [None, None], "nothing is known of the past"


def test_a_heartbeat_is_kept_with_the_stream_and_a_bad_one_is_refused() -> None:
    world = training("a", "b")
    good = wire.Heartbeat(count=1, load=0.5, celsius=60.0)
    world.hear("a", wire.NodeMessage(heartbeat=good))
    assert world.state.members.sessions["a"].beat == good


@pytest.mark.parametrize(
    "wrong",
    [{"load": 1.5}, {"load": math.nan}, {"celsius": math.inf}],
)
def test_a_heartbeat_with_what_cannot_be_costs_its_sender_alone(wrong: dict[str, float]) -> None:
    world = training("a", "b", "c", "d")
    world.hear("a", wire.NodeMessage(heartbeat=wire.Heartbeat(count=1, **wrong)))  # type: ignore[arg-type]
    assert "a" not in world.state.members.sessions
    assert {"b", "c", "d"} <= set(world.state.members.sessions)
    left = world.events(ev.NodeLeft)[-1]
    assert left.node == "a"
    assert f"heartbeat.{next(iter(wrong))} is" in left.reason
